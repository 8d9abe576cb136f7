"""Names that log collectors import. Troupe's agents collect the output of workers, so there are no log files of Ray's
kind to read."""

from __future__ import annotations

import os
import re

RAY_RUNTIME_ENV_LOG_TO_DRIVER_ENABLED = "RAY_RUNTIME_ENV_LOG_TO_DRIVER_ENABLED"
WORKER_LOG_PATTERN = re.compile(r".*worker-([0-9a-f]+)-([0-9a-f]+)-(\d+)[.](?:out|err)")
RUNTIME_ENV_SETUP_PATTERN = re.compile(r".*runtime_env_setup-(\d+)[.]log")


class LogFileInfo:
    """A log file and the position up to which it was read."""

    def __init__(
        self,
        filename: str | None = None,
        size_when_last_opened: int | None = None,
        file_position: int | None = None,
        file_handle: object = None,
        is_err_file: bool = False,
        job_id: str | None = None,
        worker_pid: int | None = None,
    ) -> None:
        self.filename, self.size_when_last_opened, self.file_position, self.file_handle = (
            filename,
            size_when_last_opened,
            file_position,
            file_handle,
        )
        self.is_err_file, self.job_id, self.worker_pid = is_err_file, job_id, worker_pid
        self.actor_name: str | None = None
        self.task_name: str | None = None

    def reopen_if_necessary(self) -> None:
        pass


class LogMonitor:
    """Finds no files and publishes nothing."""

    def __init__(self, node_ip_address: str = "", logs_dir: str = "", *args: object, **kwargs: object) -> None:
        self.ip, self.logs_dir = node_ip_address, logs_dir
        self.log_filenames: set[str] = set()
        self.open_file_infos: list[LogFileInfo] = []
        self.closed_file_infos: list[LogFileInfo] = []
        self.can_open_more_files = True

    def update_log_filenames(self) -> None:
        pass

    def open_closed_files(self) -> None:
        pass

    def check_log_files_and_publish_updates(self) -> bool:
        return False

    def should_update_filenames(self, last_file_updated_time: float) -> bool:
        return False

    def run(self) -> None:
        pass


def is_proc_alive(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except OSError:
        pass
    return True

"""A second init: the same session, or an error that names the differences and what opened the session."""

import pytest

PRIVATE = dict.fromkeys(("TROUPE_URL", "TROUPE_TOKEN_FILE", "TROUPE_FINGERPRINT", "TROUPE_NAMESPACE"), "")

# The settings of the first init, of the second, and what the error of the second says; empty: it returns the session.
TRIES = [
    ("", "", ""),
    ("gpus='sim:1x4', pickle=False, lease=60", "", ""),
    ("gpus='sim:1x4'", "gpus='sim:1x4', pickle=True, lease=15, timeout=7", ""),
    ("lease=60, name='me', output='none', working_dir='.'", "lease=60, name='me', output='none', working_dir='.'", ""),
    ("gpus='sim:1x4'", "gpus='sim:2x8'", "gpus is 'sim:1x4', not 'sim:2x8'"),
    ("pickle=False", "pickle=True", "pickle is False, not True"),
    ("", "pickle=False, device=False", "pickle is True, not False; device is True, not False"),
    ("", "resources={'CPU': 3}", "resources is None, not {'CPU': 3}"),
    ("lease=60", "lease=0", "lease is 60.0, not 15.0"),
    ("", "output='none'", "output is 'all', not 'none'"),
    ("", "working_dir='.'", "working_dir is None, not "),
    ("", "namespace='other'", "namespace is 'default', not 'other'"),
    ("", "url='nats://127.0.0.1:1'", "not 'nats://127.0.0.1:1'"),
    ("", "url='nats://me:secret of mine@127.0.0.1:1'", "not 'nats://127.0.0.1:1'"),
    ("name='me'", "name='you'", "name is 'me', not 'you'"),
    ("", "token='secret of mine'", "token is another"),
]


def test_a_second_init_with_other_settings_names_them(script):
    done = script(
        f"""
        import troupe
        for first, second, says in {TRIES!r}:
            with eval(f"troupe.init({{first}})") as opened:
                try:
                    again = eval(f"troupe.init({{second}})")
                except troupe.ExistsError as err:
                    text = str(err)
                    assert says and says in text, (first, second, text)
                    assert "opened by init(…) at <string>:1" in text and "troupe.shutdown()" in text, text
                    assert "secret of mine" not in text
                else:
                    assert not says and again is opened, (first, second)
        print("all tried")
        """,
        env=PRIVATE,
        timeout=120,
    )
    assert done.stdout == "all tried\n"


@pytest.mark.parametrize(
    "use, by",
    [
        (
            "troupe.Cluster('w', worker_classes.BasicWorker, worker_config=troupe.WorkerConfig(world_size=1))",
            "Cluster(…)",
        ),
        ("troupe.put(7)", "put(…)"),
        ("troupe.actor(worker_classes.BasicWorker)", "actor(…)"),
    ],
)
def test_init_after_an_implicit_session_says_what_opened_it(script, use, by):
    done = script(
        f"""
        import troupe, worker_classes
        {use}
        assert troupe.init() is troupe.init(gpus="auto")
        try:
            troupe.init(gpus="sim:1x4")
        except troupe.ExistsError as err:
            print(err)
        """,
        env=PRIVATE,
        timeout=60,
    )
    assert f"opened by {by} at <string>:3, with other settings: gpus is 'auto', not 'sim:1x4'" in done.stdout


def test_init_in_a_worker_returns_its_own_session(script):
    done = script(
        """
        import troupe
        class W:
            def same(self):
                return troupe.init(gpus="sim:1x4", pickle=False).is_worker and troupe.init("auto").is_worker
            def other(self):
                try:
                    troupe.init(namespace="other")
                except troupe.ExistsError as err:
                    return str(err)
        w = troupe.actor(W)
        print(w.same(), w.other())
        """,
        timeout=60,
    )
    assert done.stdout.startswith(
        "True this process has a session already, that of its run, with other settings: namespace is "
    )

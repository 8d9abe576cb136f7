"""For the programs beside it: a report in the format that pytest writes, of checks that a program has made."""

from __future__ import annotations

import sys
import xml.etree.ElementTree as ET


class Report:
    """The file that the program's first argument names."""

    def __init__(self) -> None:
        self._suite = ET.Element("testsuite")

    def check(self, name: str, holds: bool, found: object) -> None:
        case = ET.SubElement(self._suite, "testcase", classname="program", name=name)
        print(f"{name}: {found}", flush=True)
        if not holds:
            ET.SubElement(case, "failure", message=str(found))

    def write(self, said: str) -> None:
        case = ET.SubElement(self._suite, "testcase", classname="program", name="end")
        ET.SubElement(ET.SubElement(case, "properties"), "property", name="said", value=said)
        ET.ElementTree(self._suite).write(sys.argv[1])

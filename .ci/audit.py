"""Known vulnerabilities in what is installed: fails where there are some, says so where nobody could be asked."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONS = ["--local", "--skip-editable", "--progress-spinner", "off", "--format", "json", "--timeout", "15"]


def main() -> int:
    command = [sys.executable, "-m", "pip_audit", *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    try:
        packages = json.loads(done.stdout)["dependencies"]
    except ValueError:  # no answer at all
        lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
        print(f"pip-audit: not done, the advisory service cannot be reached ({lines[-1].strip()}).")
        return 0
    asked = [package for package in packages if "vulns" in package]
    bad = [package for package in asked if package["vulns"]]
    for package in bad:
        names = ", ".join(vulnerability["id"] for vulnerability in package["vulns"])
        print(f"pip-audit: {package['name']} {package['version']} has {names}.")
    if not asked:
        print(f"pip-audit: not done, the advisory service knows none of the {len(packages)} packages here.")
    elif not bad:
        print(f"pip-audit: nothing known against {len(asked)} of {len(packages)} packages; the others were not found.")
    return int(bool(bad))


sys.exit(main())

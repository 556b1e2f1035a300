"""Known vulnerabilities in what is installed: exit code 0 where there are none, 1 where there are, 2 where nothing was
audited, because no advisory service answered or it knows none of the packages."""

from __future__ import annotations

import json
import subprocess
import sys

OPTIONS = ["--local", "--skip-editable", "--progress-spinner", "off", "--format", "json", "--timeout", "15"]


def verdict(answer: str, errors: str = "") -> tuple[list[str], int]:
    """What to print, and the exit code.

    Args:
        answer: what pip-audit printed, JSON.
        errors: what it said beside.
    """
    try:
        packages = json.loads(answer)["dependencies"]
    except (ValueError, KeyError, TypeError):
        reason = (errors.strip().splitlines() or ["no answer"])[-1].strip()
        return [f"pip-audit: 0 packages audited, the advisory service cannot be reached ({reason})."], 2
    audited = [package for package in packages if "vulns" in package]
    lines = [
        f"pip-audit: {package['name']} {package['version']} has {', '.join(known['id'] for known in package['vulns'])}."
        for package in audited
        if package["vulns"]
    ]
    number = f"{len(audited)} of {len(packages)} packages audited"
    if not audited:
        return [f"pip-audit: {number}: the advisory service knows none of them."], 2
    return [*lines, f"pip-audit: {number}, {len(lines) or 'none'} with known vulnerabilities."], int(bool(lines))


def main() -> int:
    """Asks pip-audit."""
    command = [sys.executable, "-m", "pip_audit", *OPTIONS]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    lines, code = verdict(done.stdout, done.stderr)
    print("\n".join(lines))
    return code


if __name__ == "__main__":
    sys.exit(main())

"""Which program this is: its commit, and the versions of what it runs on."""
import platform
import subprocess
from importlib.metadata import version
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGES = ("torch", "transformers", "av")


def commit() -> str:
    """The commit in ten digits, with "-dirty" if a file has changed since; "unknown" in a copy
    without its history.
    """
    if not (ROOT / ".git").exists():                   # or git would name a repository around it
        return "unknown"
    command = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=10",
               "--exclude=*"]
    try:
        process = subprocess.run(command, capture_output=True, text=True)
    except OSError:                                    # there is no git
        return "unknown"
    return process.stdout.strip() or "unknown"


def versions() -> dict[str, str]:
    """{what: its version}, the commit first."""
    return {
        "commit": commit(),
        "python": platform.python_version(),
        **{name: version(name) for name in PACKAGES},
    }

"""Starts the rows of real_rows.py and the processes that encode its kitchens, side by side; tells them
how many steps the slowest row can take; ends after --seconds. (Nothing large is imported here: the
others begin at once.)

    python -m experiments.real_side .real --output OUT --seconds 262 --commit HASH
"""
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROWS = ["online", "none", "clam", "clam, seed 1", "delta"]
LEFT = 16                       # seconds in which the rows are measured in the end


def main():
    begun = time.time()
    given = dict(zip(sys.argv[2::2], sys.argv[3::2]))
    seconds = float(given.setdefault("--seconds", "262"))
    encoders = int(given.setdefault("--encoders", "14"))
    rows = given.pop("--rows", "; ".join(ROWS)).split("; ")
    output = Path(given["--output"])
    output.mkdir(parents=True, exist_ok=True)
    work = Path(given.setdefault("--work", tempfile.mkdtemp()))
    given |= {"--begun": str(begun), "--of-rows": str(len(rows))}
    command = [sys.executable, "-m", "experiments.real_rows", sys.argv[1]]
    command += [word for pair in given.items() for word in pair]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
    processes = {}
    for kind, name in [("encode", str(n)) for n in range(encoders)] + [("row", name) for name in rows]:
        if kind == "row" or not (work / f"part-{name}.pt").exists():
            with (work / f"{kind}-{name}.log").open("w") as log:
                processes[kind, name] = subprocess.Popen([*command, f"--{kind}", name],
                                                         env=environment, stderr=log)
    steps = work / "steps"
    told = set()
    while time.time() < begun + seconds:
        alive = [name for (kind, name), process in processes.items()
                 if kind == "row" and process.poll() is None]
        if not alive:
            break
        for (kind, name), process in processes.items():
            if process.poll() and (kind, name) not in told:
                told.add((kind, name))
                error = (work / f"{kind}-{name}.log").read_text()[-1500:]
                print(kind, name, "failed:", error, flush=True)
                (output / "failed.txt").open("a").write(f"{kind} {name}\n{error}\n")
        paces = [work / f"pace-{name}" for name in alive]
        if time.time() > begun + seconds / 2:                   # without a row that has not come so far
            paces = list(work.glob("pace-*"))
        if not steps.exists() and paces and all(file.exists() for file in paces):
            slowest = max(float(file.read_text()) for file in paces)
            left = begun + seconds - LEFT - time.time()
            count = max(1, int(0.97 * left / slowest))
            print("seconds a step:", {file.name: float(file.read_text()) for file in paces},
                  "steps:", count, flush=True)
            (work / "new-steps").write_text(str(count))
            os.replace(work / "new-steps", steps)
        time.sleep(0.05)
    for process in processes.values():
        if process.poll() is None:
            process.kill()
    print("all", round(time.time() - begun, 1), "s", flush=True)


if __name__ == "__main__":
    main()

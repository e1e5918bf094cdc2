"""Everything that only a GPU can show, in one command: python -m experiments.gpu --json gpu.json

    tests       the tests that concern CUDA (pytest -m cuda): published narrations in fp32, captured
                passes beside plain ones, gradients beside the processor's, states
    streams     FlowNar-C, FlowNar and the baselines with language models of 1B and 8B shape in
                bf16: frames/s of a recording and live, ms of a frame and of a word, memory, and 1,
                4 and 16 streams at once (experiments/efficiency.py)
    pixels      the published size from pictures (experiments/full_size.py); its narrator of random
                weights stays in out/full-size
    training    a training step of each variant (experiments/training_step.py)
    compiled    streams with passes compiled by torch.compile, instead of captured graphs
    clam        the three forms of CLAM (experiments/clam_forms.py)

Each part is a process of its own, with a time limit: where one fails, the others still run, and
what a part has printed is kept. The file is written after each part. Without a GPU every part is
skipped, unless --small runs it on the processor with small sizes, to see that the command works.
"""
import json
import subprocess
import sys
import time

import torch

from support.common.disk import check_writable, write_text
from support.common.errors import command_line
from support.common.options import Parser, positive_int

EFFICIENCY = ["experiments.efficiency", "--json"]
FULL_SIZE = ["experiments.full_size", "--json"]
TRAINING_STEP = ["experiments.training_step", "--json"]
CLAM_FORMS = ["experiments.clam_forms"]


def parts(small: bool) -> dict[str, list[str]]:
    """The command of each part, in the order of what matters most where time is short."""
    tests = ["pytest", "-q", "-m", "cuda", "tests/engine/test_cuda.py"]
    return {"tests": tests} | (small_parts() if small else large_parts())


def large_parts() -> dict[str, list[str]]:
    commands = {}

    def streams(size: str, frames: int) -> None:
        for name, lookahead, count in (("recorded", 16, 16), ("live", 1, 4)):
            commands[f"streams, {size}, {name}"] = [
                *EFFICIENCY, "--config", size, "--dtype", "bfloat16", "--frames", str(frames),
                "--lookahead", str(lookahead), "--streams", str(count),
            ]

    streams("1b", 3000)
    for frames_of_pass in (4, 16):              # of the language model and of the vision encoder
        commands[f"pixels, 1b, {frames_of_pass} frames a pass"] = [
            *FULL_SIZE, "--device", "cuda", "--dtype", "bfloat16", "--frames", "400",
            "--lookahead", str(frames_of_pass), "--folder", "out/full-size",
        ]
    training = [
        *TRAINING_STEP, "--dtype", "bfloat16", "--layers", "16", "--width", "2048",
        "--inner", "8192", "--heads", "32", "--kv-heads", "8", "--rank", "128", "--frames", "800",
    ]
    commands["training, 1b"] = training
    commands["compiled, 1b, live"] = [
        *EFFICIENCY, "--config", "1b", "--dtype", "bfloat16", "--frames", "500",
        "--lookahead", "1", "--variants", "FlowNar-C", "--compile",
    ]
    commands["clam"] = CLAM_FORMS
    streams("8b", 1000)
    return commands


def small_parts() -> dict[str, list[str]]:
    return {
        "streams, toy, live": [
            *EFFICIENCY, "--frames", "16", "--window", "8", "--macs-frames", "8", "--words", "2",
            "--variants", "FlowNar-C", "--lookahead", "1", "--streams", "2",
        ],
        "pixels, 1 layer": [*FULL_SIZE, "--layers", "1", "--frames", "8"],
        "training, toy": [
            *TRAINING_STEP, "--frames", "16", "--width", "64", "--inner", "64", "--heads", "2",
            "--kv-heads", "1", "--steps", "1",
        ],
        "clam": [
            *CLAM_FORMS, "--width", "16", "--heads", "2", "--length", "40", "--reads", "4",
            "--no-compile",
        ],
    }


def run_part(command: list[str], seconds: float) -> dict:
    """Run a part's command, for at most so many seconds: how it ended, and what it printed."""
    began = time.perf_counter()
    try:
        done = subprocess.run([sys.executable, "-m", *command], capture_output=True, text=True,
                              timeout=seconds)
        code, output, errors = done.returncode, done.stdout, done.stderr
    except subprocess.TimeoutExpired as stopped:
        code = None
        output = (stopped.stdout or b"").decode(errors="replace")
        errors = f"stopped after {seconds:.0f} s"
    result = {
        "command": " ".join(command),
        "exit_code": code,
        "seconds": round(time.perf_counter() - began, 1),
        "output": output.splitlines()[-60:],
        "errors": errors.splitlines()[-20:],
    }
    # the experiments print their numbers as one JSON object in the last line
    last_line = output.splitlines()[-1] if output.strip() else ""
    if last_line.startswith("{"):
        result["numbers"] = json.loads(last_line)
    return result


def hardware() -> dict:
    """What the numbers were measured on."""
    facts = {"torch": torch.__version__, "cuda": torch.version.cuda}
    if torch.cuda.is_available():
        properties = torch.cuda.get_device_properties(0)
        facts |= {"device": properties.name, "memory_gb": round(properties.total_memory / 1e9, 1)}
    return facts


def run_gpu(args) -> None:
    check_writable(args.json)
    report = {"hardware": hardware(), "parts": {}}
    deadline = time.perf_counter() + 60 * args.minutes
    for name, command in parts(args.small).items():
        left = deadline - time.perf_counter()
        if not torch.cuda.is_available() and not args.small:
            report["parts"][name] = {"command": " ".join(command), "skipped": "needs a GPU"}
        elif left < 10:
            report["parts"][name] = {"command": " ".join(command), "skipped": "no time was left"}
        else:
            report["parts"][name] = run_part(command, left)
        print(f"{name}: {outcome(report['parts'][name])}", flush=True)
        write_text(args.json, json.dumps(report, indent=1) + "\n")
    print(f"written: {args.json}", file=sys.stderr)


def outcome(part: dict) -> str:
    """One line on how a part ended."""
    if "skipped" in part:
        return f"skipped, {part['skipped']}"
    if part["exit_code"] is None:
        return part["errors"][-1]
    last_line = (part["output"] or part["errors"] or [""])[-1]
    if part["exit_code"] != 0:
        last_line = (part["errors"] or part["output"] or [""])[-1]
        return f"failed after {part['seconds']} s: {last_line}"
    if "numbers" in part:
        return f"done in {part['seconds']} s"
    return f"done in {part['seconds']} s: {last_line}"


def main():
    parser = Parser(prog="python -m experiments.gpu",
                    description="All measurements and tests that need a GPU, in one file.")
    parser.add_argument("--json", metavar="FILE", default="gpu.json",
                        help="the report (default: %(default)s)")
    parser.add_argument("--minutes", type=positive_int, default=9,
                        help="time for all parts; those that do not fit are skipped "
                             "(default: %(default)s)")
    parser.add_argument("--small", action="store_true",
                        help="small sizes, also without a GPU: does the command work?")
    args = parser.parse_args()
    command_line(lambda: run_gpu(args))


if __name__ == "__main__":
    main()

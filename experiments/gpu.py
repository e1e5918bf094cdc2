"""One GPU: frames/s of a narrator of the paper's size, plain and by CUDA graphs (streams/graphs.py), in
turn (docs/speed.md).

    python -m experiments.gpu --seconds 150

From features and from pictures of 432 x 768, with look-ahead 1 and 4; FlowNar-C with the last ten
narrations, one of 12 given words every 8 frames. The first frames of a stream are not timed: there it
records its graphs. One JSON object a line; then where a frame's time goes.
"""
import argparse
import json
import subprocess
import time
from itertools import cycle, islice
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory

import numpy as np
import torch

import stream
from experiments.cost import LLAMA, Size, given_narrations, random_frames, random_narrator
from narrator import VisionEncoder
from streams import graphs
from streams.bounds import open_stream
from support.common.disk import write_json
from support.common.devices import device_and_dtype, synchronise
from support.common.options import Parser, device_option, dtype_option, positive_int
from support.engine.compiled import compile_narrator
from support.files.features import encode_pictures

FIRST = 48                      # frames that are not timed


SIGLIP = {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
          "num_attention_heads": 16}       # SigLIP-L/16-384


def llama_1b(layers: int | None) -> Size:
    """Of Llama-3.2-1B, or of its first layers."""
    return LLAMA["1b"]._replace(layers=layers or LLAMA["1b"].layers)


def make_vision_model(folder: Path, layers: int | None, device: str = "cpu") -> None:
    """SigLIP-L/16-384 in bf16 with random weights, made on a device, in a folder."""
    from transformers import SiglipConfig, SiglipModel
    size = SIGLIP | {"num_hidden_layers": layers or SIGLIP["num_hidden_layers"]}
    # needed by no narrator
    text = {"vocab_size": 64, "hidden_size": 1024, "num_hidden_layers": 1,
            "num_attention_heads": 16, "bos_token_id": 0, "eos_token_id": 1}
    with torch.device(device):
        vision = SiglipModel(SiglipConfig(
            text_config=text, vision_config=size | {"image_size": 384, "patch_size": 16}))
    vision.to(torch.bfloat16).save_pretrained(folder)
    write_json(folder / "preprocessor_config.json",
               {"image_mean": [0.5] * 3, "image_std": [0.5] * 3})


class Forms:
    """The plain form of a narrator and of its encoder, and the one by graphs, in turn."""

    def __init__(self, narrator, encoder):
        self.narrator = narrator
        self.encoder = encoder
        self.modules = (narrator, narrator.memory, encoder)
        self.plain = [dict(vars(module)) for module in self.modules]
        context = open_stream(narrator, lookahead=1, guesses=0)
        graphs.use_graphs(context, encoder)
        self.recorded = [dict(vars(module)) for module in self.modules]

    def open(self, form: str, lookahead: int):
        for module, attributes in zip(self.modules, getattr(self, form)):
            vars(module).clear()
            vars(module).update(attributes)
        context = open_stream(self.narrator, lookahead=lookahead, guesses=0)
        if form == "recorded":
            graphs.use_graphs(context, self.encoder)
        return context


def clock_of_gpu() -> str:
    if not torch.cuda.is_available():
        return ""
    query = ["nvidia-smi", "--query-gpu=clocks.sm,clocks.mem,power.draw,utilization.gpu",
             "--format=csv,noheader"]
    return subprocess.run(query, capture_output=True, text=True).stdout.strip()


def measure(forms: Forms, form: str, source: str, lookahead: int, frames: int, pictures) -> dict:
    narrator = forms.narrator
    context = forms.open(form, lookahead)
    x = random_frames(narrator, FIRST + frames)
    if source == "pictures":
        some = islice(cycle(pictures), FIRST + frames)
        x = encode_pictures(some, forms.encoder, lookahead)
    given = given_narrations(narrator, FIRST + frames)
    p_skip = []
    for decision in stream.narrate(narrator, x, given=given, context=context):
        p_skip.append(decision.p_skip)
        if decision.frame == FIRST - 1:
            synchronise(narrator.llm.device)
            began, of_processor = time.perf_counter(), time.process_time()
    synchronise(narrator.llm.device)
    seconds = time.perf_counter() - began
    busy = time.process_time() - of_processor
    return {"form": form, "from": source, "lookahead": lookahead, "frames/s": round(frames / seconds, 1),
            "ms a frame": round(1e3 * seconds / frames, 3),
            "of the processor": round(1e3 * busy / frames, 3),
            "cache": context.cache.text + context.cache.visual, "clock": clock_of_gpu(),
            "p_skip": p_skip}


def profile(forms: Forms, form: str) -> None:
    """What 16 frames with a narration of 12 words each 8 take, from features."""
    from torch.profiler import ProfilerActivity
    narrator = forms.narrator
    context = forms.open(form, 4)
    given = given_narrations(narrator, FIRST + 17)
    frames = random_frames(narrator, FIRST + 17)
    profiler = torch.profiler.profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA])
    for decision in stream.narrate(narrator, frames, given=given, context=context):
        if decision.frame == FIRST - 1:
            synchronise(narrator.llm.device)
            profiler.start()
            began = time.perf_counter()
        if decision.frame == FIRST + 15:
            synchronise(narrator.llm.device)
            seconds = time.perf_counter() - began
            profiler.stop()
            break
    table = profiler.key_averages()
    print(f"== {form}: 16 frames with the profiler on, ms: {1e3 * seconds:.1f}")
    print(table.table(sort_by="self_cuda_time_total", row_limit=22, max_name_column_width=60))
    print(table.table(sort_by="self_cpu_time_total", row_limit=22, max_name_column_width=60))


def time_attention() -> None:
    """Microseconds of one attention of a word, by each of PyTorch's kernels."""
    from torch.nn.attention import SDPBackend, sdpa_kernel
    import torch.nn.functional as F
    for tokens in (512, 1024):
        q, k = (torch.randn(1, 8, n, 64, device="cuda", dtype=torch.bfloat16) for n in (4, tokens))
        mask = torch.zeros(1, 1, 4, tokens, device="cuda", dtype=torch.bfloat16)
        for backend in ("CUDNN_ATTENTION", "EFFICIENT_ATTENTION", "MATH"):
            with sdpa_kernel(getattr(SDPBackend, backend)):
                F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
                graph = torch.cuda.CUDAGraph()
                with torch.cuda.graph(graph):
                    for _ in range(100):
                        F.scaled_dot_product_attention(q, k, k, attn_mask=mask)
                graph.replay()
                torch.cuda.synchronize()
                began = time.perf_counter()
                for _ in range(5):
                    graph.replay()
                torch.cuda.synchronize()
            print(tokens, backend, round((time.perf_counter() - began) / 500 * 1e6, 2), flush=True)


def main() -> None:
    parser = Parser(prog="python -m experiments.gpu", description="Frames/s on a GPU.")
    parser.add_argument("--frames", type=positive_int, default=160)
    parser.add_argument("--layers", type=positive_int)
    parser.add_argument("--seconds", type=positive_int, default=150)
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--repetitions", type=positive_int, default=3)
    device_option(parser)
    dtype_option(parser)
    args = parser.parse_args()
    end = time.perf_counter() + args.seconds
    device, dtype = device_and_dtype(args.device, args.dtype)
    torch.manual_seed(0)
    narrator = random_narrator(llama_1b(args.layers), device, dtype, last_k=10)
    narrator = narrator.eval().requires_grad_(False).merge()
    with TemporaryDirectory() as folder:
        make_vision_model(Path(folder), args.layers, device)
        encoder = VisionEncoder(folder, narrator.config.grid, device, dtype)
    pictures = np.random.default_rng(0).integers(0, 256, (64, 432, 768, 3), np.uint8)
    forms = Forms(narrator, encoder)
    print("made", round(time.perf_counter() + args.seconds - end, 1), clock_of_gpu(), flush=True)

    speeds = {}
    for repetition in range(args.repetitions):
        for lookahead in (4, 1):
            for source in ("pictures", "features"):
                p_skip = {}
                for form in ("recorded", "plain"):
                    if time.perf_counter() > end:
                        continue
                    try:
                        costs = measure(forms, form, source, lookahead, args.frames, pictures)
                    except Exception:
                        import traceback
                        print(traceback.format_exc()[-2500:], flush=True)
                        continue
                    p_skip[form] = torch.tensor(costs.pop("p_skip")[1:])
                    print(json.dumps(costs), flush=True)
                    speeds.setdefault((form, source, lookahead), []).append(costs["frames/s"])
                if len(p_skip) == 2:
                    difference = (p_skip["plain"] - p_skip["recorded"]).abs().max().item()
                    print(f"p([SKIP]) differs by at most {difference:.2g}", flush=True)
    for (form, source, lookahead), values in speeds.items():
        print(f"{form:9} {source:9} {lookahead} {median(values):7.1f} frames/s, of {values}")
    if args.compile and torch.cuda.is_available():
        from torch.nn.attention import SDPBackend, sdpa_kernel
        for backend in (SDPBackend.CUDNN_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH):
            with sdpa_kernel([backend, SDPBackend.MATH]):
                costs = measure(forms, "recorded", "features", 1, args.frames, pictures)
            print(backend, costs["frames/s"], flush=True)
        time_attention()
        profile(forms, "recorded")
    if args.compile:
        began = time.perf_counter()
        compile_narrator(narrator)
        for lookahead in (4, 1):
            costs = measure(forms, "recorded", "features", lookahead, args.frames, pictures)
            costs.pop("p_skip")
            costs["seconds in all"] = round(time.perf_counter() - began, 1)
            print("compiled", json.dumps(costs), flush=True)


if __name__ == "__main__":
    main()

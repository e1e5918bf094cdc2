"""Real parts, fair: rows that differ in the memory alone, side by side on one GPU, within minutes.

    python -m experiments.real_side .real --output $OUT --seconds 262

SmolLM2-135M and DINOv2 ViT-S are frozen (experiments/real_pack.py); connector, memory and LoRA are
trained by the paper's loss alone on the toy's kitchens, with the published connector and features
whose mean of each place is taken away. All rows see the same videos, equally often: as often as the
slowest can in the time.

For speed, a step is one pass for all of its videos, LoRA is added to the weights before they multiply,
and the memory reads the segments of all videos at once: the numbers of train.py, up to rounding
(`--check` compares them).
"""
import argparse
import json
import os
import time
from math import cos, pi
from pathlib import Path

import numpy as np
import torch
import torch.nn.functional as F
from safetensors.torch import load_file
from torch import Tensor

import baselines  # noqa: F401  its memories
import narrator as nar
from experiments.real_pack import MEAN, STD, decoded, vision_model
from support.engine.norms import fuse_norms
from support.engine.pictures import letterbox
from support.engine.start import start_linear_layers, start_memory
from toy import world

ROWS = {
    "online": {"memory": "none", "prune": False, "last_k": None},
    "none": {"memory": "none"},
    "clam": {"memory": "clam"},
    "clam, seed 1": {"memory": "clam", "seed": 1},
    "delta": {"memory": "delta"},
}
M = 10
HEADS = 4
RATE = 6e-4
WARMUP = 0.05
CLIP = 1.0
TEST = 128                      # videos
LOOKED = 32                     # of them, at which is looked during the training
LOOKS = 4
BLOCK = 64                      # lengths are multiples of it: attention likes whole blocks
WORDS = {"seen": 1, "hidden": 2}        # in `asked`


def schedule(step: int, steps: int, warmup: float) -> float:
    """train.py's, which needs packages that a GPU's machine may lack."""
    rising = max(1, round(warmup * steps))
    if step < rising:
        return (step + 1) / rising
    fallen = (step - rising) / (steps - rising)                     # 0 .. 1
    return 0.5 * (1 + cos(pi * fallen))


class KnownTexts:
    """The tokenizer, as a table of the texts that are needed."""
    unk_token_id = None

    def __init__(self, about: dict):
        self.texts = about["texts"]
        self.bos_token_id = about["bos"]
        self.eos_token_id = about["eos"]

    def __call__(self, text: str, **_) -> dict:
        ids, _ = self.texts[text]
        return {"input_ids": ids}

    def get_vocab(self) -> dict:
        return {}


def read_about(folder: Path, what: str) -> dict:
    return json.loads((folder / f"{what}.json").read_text())


def read_parts(folder: Path, what: str) -> dict[str, Tensor]:
    """A model's tensors, in fp32."""
    tensors = decoded(load_file(folder / f"{what}.safetensors"), read_about(folder, what)["shapes"])
    return {name.removeprefix(f"{what}."): tensor for name, tensor in tensors.items()}


# ------------------------------------------------------------------ the kitchens

def write_kitchens(args: argparse.Namespace, part: int) -> None:
    """A share of the videos, encoded and tokenised: part-N.pt."""
    device = args.device
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    vision = vision_model(read_parts(args.parts, "vision"), dtype).to(device)
    mean = torch.tensor(MEAN, device=device)[:, None, None]
    std = torch.tensor(STD, device=device)[:, None, None]
    texts = KnownTexts(read_about(args.parts, "llm")["texts"])
    layouts = {memory: nar.Layout(texts, 10, memory) for memory in (0, M)}
    seeds = [*world.SEEDS["test"][:args.test], *world.SEEDS["train"][:args.videos]]
    videos = []
    for index in range(part, len(seeds), args.encoders):
        rng = np.random.default_rng((seeds[index], 0))
        low, high = world.SEGMENTS
        kitchen = world.Kitchen(seeds[index], int(rng.integers(low, high + 1)))
        pictures = torch.from_numpy(np.stack([kitchen.render(t) for t in range(len(kitchen))]))
        with torch.no_grad():
            x = []
            for piece in pictures.split(256):
                pixels = letterbox(piece.to(device).float() / 255, vision.config.image_size)
                x.append(nar.frame_tokens(vision, ((pixels - mean) / std).to(dtype), 3))
        sequences = {memory: sequence(layout, texts, kitchen) for memory, layout in layouts.items()}
        ends = torch.tensor([narration.frame for narration in kitchen.narrations])
        x = torch.cat(x).to("cpu", torch.bfloat16)
        videos.append({"index": index, "x": x, "ends": ends} | sequences)
    name = args.work / f"part-{part}.pt"
    torch.save(videos, f"{name}.new")
    os.replace(f"{name}.new", name)


def sequence(layout: nar.Layout, texts: KnownTexts, kitchen: world.Kitchen) -> Tensor:
    """ids, kind, segment, number, label, and which words are asked for [6, L]."""
    said = [(narration.frame, " " + narration.text) for narration in kitchen.narrations]
    tokens = layout.sequence([(frame, layout.encode(text)) for frame, text in said])
    kind, segment, number = (torch.tensor(values)
                             for values in (tokens.kind, tokens.segment, tokens.number))
    asked = torch.zeros(len(tokens)).long()
    for n, (narration, (_, text)) in enumerate(zip(kitchen.narrations, said)):
        of_narration = (kind == nar.NARRATION) & (segment == n) & (number == n)
        first, *_ = of_narration.nonzero()[:, 0].tolist()
        _, places = texts.texts[text]
        for place in places:
            before = first + len(layout.assistant) + place - 1
            asked[before] = WORDS["hidden" if narration.memory_words else "seen"]
    return torch.stack([torch.tensor(tokens.ids), kind, segment, number, tokens.labels(), asked])


class Kitchens:
    """All videos in the memory of the device, centred: CLS by its mean over the training's frames,
    patches by one mean of all places. (Without its own mean, no linear map would know a place.)"""

    def __init__(self, args: argparse.Namespace, memory: int, device: str):
        videos = {}
        for part in range(args.encoders):
            file = args.work / f"part-{part}.pt"
            while not file.exists():
                time.sleep(0.1)
            for video in torch.load(file):
                videos[video["index"]] = video
        self.videos = [videos[i] for i in range(len(videos))]
        self.frames = [len(video["x"]) for video in self.videos]
        self.begins = np.cumsum([0, *self.frames[:-1]]).tolist()
        self.x = torch.cat([video.pop("x").to(device) for video in self.videos])        # [.., J, D]
        self.memory = memory
        self.test = list(range(args.test))
        self.train = list(range(args.test, len(self.videos)))
        mean = 0
        learned = self.x[self.begins[args.test]:]
        for piece in learned.split(4096):
            mean = mean + piece.float().sum(0)
        mean = mean / len(learned)                                                      # [J, D]
        common = mean.clone()
        common[1:] = mean[1:].mean(0)
        for piece in self.x.split(4096):
            piece.copy_(piece.float() - common)
        self.average = (mean - common).cpu()                                            # frame [J, D]

    def of(self, index: int) -> Tensor:
        begin = self.begins[index]
        return self.x[begin:begin + self.frames[index]]


class Batch:
    """Several videos, as tensors on the device; the shorter ones are padded."""

    def __init__(self, kitchens: Kitchens, indices: list[int], prune: bool, last_k: int | None):
        device = kitchens.x.device
        videos = [kitchens.videos[i] for i in indices]
        sequences = [video[kitchens.memory] for video in videos]
        longest = -(-max(s.shape[1] for s in sequences) // BLOCK) * BLOCK
        pads = torch.tensor([0, -1, -1, -1, -100, 0])[:, None]
        padded = torch.stack([torch.cat([s, pads.expand(-1, longest - s.shape[1])], 1)
                              for s in sequences])                              # [B, 6, L]
        learned = padded[:, 4] != -100
        share = learned / learned.sum(1, keepdim=True) / len(learned)
        self.learned = learned.flatten().nonzero()[:, 0].to(device)     # here, so that nothing waits
        self.share = share[learned].to(device)
        padded = padded.to(device)
        self.ids, kind, segment, number, labels, asked = padded.unbind(1)               # [B, L]
        self.labels = labels.flatten()[self.learned]
        self.asked = asked.flatten()[self.learned]
        self.x = torch.cat([kitchens.of(i) for i in indices]).float()           # [all T, J, D]
        J = self.x.shape[1]

        # the tokens of each segment but the last, as rows of x; pads are the row behind the last
        begin = 0
        self.reads = [len(video["ends"]) - 1 for video in videos]
        bounds = torch.zeros(len(videos), max(self.reads) + 1, dtype=torch.long)
        for row, video, i in zip(bounds, videos, indices):
            ends = video["ends"]
            row[0] = begin
            row[1:len(ends)] = begin + ends[:-1] + 1
            row[len(ends):] = begin + ends[-2] + 1
            begin += kitchens.frames[i]
        lengths = bounds.diff() * J
        place = torch.arange(lengths.max())
        is_token = place < lengths[..., None]
        rows = torch.where(is_token, bounds[:, :-1, None] * J + place, len(self.x) * J)
        self.rows, self.is_token = rows.to(device), is_token.to(device)         # [B, n, P]

        self.mask = None
        if prune:
            def kinds(k):
                return (kind == k)[:, None, :]
            same = segment[:, :, None] == segment[:, None, :]
            kept = number[:, None, :] >= segment[:, :, None] - last_k
            sees = kinds(nar.PROMPT) | kinds(nar.VISUAL) & same | kinds(nar.NARRATION) & (kept | same)
            sees = sees.tril()
            # a padded row sees itself: attention to no key at all would be NaN
            sees |= torch.eye(longest, dtype=torch.bool, device=device)
            self.mask = sees[:, None]                                           # [B, 1, L, L]


# ------------------------------------------------------------------ a pass

def read_outs(memory, batch: Batch) -> Tensor:
    """The memory tokens at the end of each segment but the last, of one video after the other
    [all n, M, D]: `Narrator.read_outs`."""
    tokens = F.pad(batch.x.flatten(0, 1), (0, 0, 0, 1))
    x = tokens[batch.rows]                                                      # [B, n, P, D]
    state = memory.initial_state(len(x))
    states = []
    if hasattr(memory, "beta"):
        for piece in x.unbind(1):               # a pad is 0, so its key is, too: it writes nothing
            state = memory.step(piece, state)
            states.append(state)
    else:
        k, v, log_gate = memory.project(x)
        is_token = batch.is_token[..., None, None]
        decay, update = memory.absorb(k * is_token, v, log_gate * is_token)
        for decay_n, update_n in zip(decay.unbind(1), update.unbind(1)):
            state = decay_n[..., None] * state + update_n
            states.append(state)
    states = torch.cat([of_video[:n] for of_video, n in zip(torch.stack(states, 1), batch.reads)])
    return memory.read(states)


def with_lora(module, x: Tensor) -> Tensor:
    W = module.base_layer.weight
    A = module.lora_A.weight.to(W.dtype)
    B = module.lora_B.weight.to(W.dtype)
    return F.linear(x, torch.addmm(W, B, A, alpha=module.scale))


def rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos + torch.cat([-second, first], -1) * sin


def hidden_states(narrator: nar.Narrator, batch: Batch) -> Tensor:
    """`Narrator.forward` of several videos [B, L, D_lm]."""
    model = narrator.llm.model
    h = model.embed_tokens(batch.ids.clamp_min(0))
    all_tokens = [(nar.FRAME, batch.x)]
    if narrator.memory.M:
        all_tokens.append((nar.MEMORY, read_outs(narrator.memory, batch)))
    for placeholder, tokens in all_tokens:
        embedded = narrator.connector(tokens).to(h.dtype)
        h = h.masked_scatter((batch.ids == placeholder)[..., None], embedded)
    mask = batch.mask
    if mask is not None:
        mask = torch.zeros(mask.shape, dtype=h.dtype, device=h.device).masked_fill(~mask, -torch.inf)
    cos, sin = model.rotary_emb(h, torch.arange(h.shape[1], device=h.device)[None])
    cos, sin = cos[:, None], sin[:, None]
    for layer in model.layers:
        attention = layer.self_attn
        x = layer.input_layernorm(h)
        q, k, v = (with_lora(module, x).unflatten(-1, (-1, attention.head_dim)).transpose(1, 2)
                   for module in (attention.q_proj, attention.k_proj, attention.v_proj))
        q, k = rotated(q, cos, sin), rotated(k, cos, sin)
        shared = q.shape[1] // k.shape[1]
        k, v = (t.repeat_interleave(shared, 1) for t in (k, v))
        if mask is not None:
            mask = mask.expand(-1, q.shape[1], -1, -1)
        x = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
        h = h + with_lora(attention.o_proj, x.transpose(1, 2).flatten(2))
        x = layer.post_attention_layernorm(h)
        x = F.silu(with_lora(layer.mlp.gate_proj, x)) * with_lora(layer.mlp.up_proj, x)
        h = h + with_lora(layer.mlp.down_proj, x)
    return model.norm(h)


def loss_of(narrator: nar.Narrator, batch: Batch):
    """The loss of a step (§3.5), and of each learned token: its loss, whether it is the likeliest,
    and which word is asked for."""
    hidden = hidden_states(narrator, batch).flatten(0, 1)[batch.learned]
    logits = with_lora(narrator.llm.lm_head, hidden).float()
    losses = F.cross_entropy(logits, batch.labels, reduction="none")
    loss = (losses * batch.share).sum()
    return loss, losses.detach(), logits.detach().argmax(-1) == batch.labels, batch.asked


def shares_that_differ(memory: Tensor) -> tuple[float, float]:
    """commands/evaluate_command.py's, too, of read-outs [N, M, D]."""
    size = memory.square().mean()
    between_tokens = (memory - memory.mean(1, keepdim=True)).square().mean() / size
    between_read_outs = (memory - memory.mean(0)).square().mean() / size
    return between_tokens.item(), between_read_outs.item()


# ------------------------------------------------------------------ a row

def language_model(args: argparse.Namespace, about: dict, device: str):
    from transformers import LlamaConfig, LlamaForCausalLM
    config = LlamaConfig(**about["llm"])
    weights = read_parts(args.parts, "llm")
    if args.layers:
        config.num_hidden_layers = args.layers
        weights = {name: tensor for name, tensor in weights.items()
                   if ".layers." not in name or int(name.split(".")[2]) < args.layers}
    llm = LlamaForCausalLM(config)
    report = llm.load_state_dict(weights, strict=False)
    assert set(report.missing_keys) <= {"lm_head.weight"} and not report.unexpected_keys, report
    llm.tie_weights()
    llm = llm.to(torch.bfloat16 if device == "cuda" else torch.float32).eval()
    fuse_norms(llm)
    return llm


@torch.no_grad()
def make_values_blind(memory, average: Tensor) -> None:
    """First values without what is in the average frame [J, D]: else most of what is read is that."""
    directions = torch.linalg.svd(average, full_matrices=False).Vh              # [J, D]
    memory.w_v.weight -= memory.w_v.weight @ directions.T @ directions
    memory.w_o.weight.copy_(memory.w_v.weight.T)


def new_narrator(args: argparse.Namespace, name: str, llm, about: dict, kitchens: Kitchens):
    """With first weights: our start of the memory, the published connector."""
    settings = dict(ROWS[name])
    torch.manual_seed(settings.pop("seed", 0))
    config = nar.make_config(**dict(
        llm="smollm2", vision="dinov2", width=kitchens.x.shape[2], memory_tokens=M,
        memory_heads=HEADS, memory_dropout=0.0, lora_rank=32, lora_alpha=64, lora_dropout=0.0,
        last_k=10) | settings)
    narrator = nar.new_narrator(llm, KnownTexts(about["texts"]), config)
    frames = torch.cat([kitchens.of(i)[:128] for i in kitchens.train[:64]]).float().cpu()
    start_memory(narrator.memory, frames)
    if narrator.memory.HAS_HEADS:
        make_values_blind(narrator.memory, kitchens.average)
    start_linear_layers(narrator.connector)
    if hasattr(narrator.memory, "CHUNK"):
        narrator.memory.CHUNK = 256             # a segment at once
    return narrator.to(kitchens.x.device).train()


class Row:
    def __init__(self, args: argparse.Namespace, name: str):
        self.args = args
        self.name = name
        self.device = args.device
        if args.device == "cuda":
            torch.backends.cuda.matmul.allow_tf32 = False
        about = read_about(args.parts, "llm")
        llm = language_model(args, about, args.device)          # while the kitchens are encoded
        has_memory = ROWS[name]["memory"] != "none"
        self.kitchens = Kitchens(args, M if has_memory else 0, args.device)
        self.narrator = new_narrator(args, name, llm, about, self.kitchens)
        self.prune = self.narrator.config.prune
        self.last_k = self.narrator.config.last_k
        self.parameters = list(self.narrator.trainable().values())
        self.generator = torch.Generator().manual_seed(0)       # the same order in all rows
        self.order = []

    def batch(self, indices: list[int]) -> Batch:
        return Batch(self.kitchens, indices, self.prune, self.last_k)

    def next_videos(self) -> list[int]:
        if len(self.order) < self.args.batch:
            chosen = torch.randperm(len(self.kitchens.train), generator=self.generator)
            self.order += [self.kitchens.train[i] for i in chosen.tolist()]
        chosen, self.order = self.order[:self.args.batch], self.order[self.args.batch:]
        return chosen

    def write(self, **numbers) -> None:
        line = {"row": self.name, **numbers, "commit": self.args.commit,
                "seconds": round(time.time() - self.args.begun, 1)}
        text = json.dumps(line)
        print(text, flush=True)
        file = self.args.output / f"{self.name.replace(', ', '-').replace(' ', '')}.jsonl"
        with file.open("a") as lines:
            lines.write(text + "\n")

    @torch.no_grad()
    def measures(self, videos: list[int]) -> dict:
        """The mean loss of the learned tokens, the shares of words that are right, and what differs
        between memory tokens and read-outs."""
        losses, rights, asked, differ = [], [], [], []
        for begin in range(0, len(videos), 8):
            batch = self.batch(videos[begin:begin + 8])
            _, *found = loss_of(self.narrator, batch)
            for kept, values in zip((losses, rights, asked), found):
                kept.append(values.cpu())
            if self.narrator.memory.M:
                memory = read_outs(self.narrator.memory, batch)
                for of_video in memory.split(batch.reads):
                    differ.append(shares_that_differ(of_video.float().cpu()))
        losses, rights, asked = torch.cat(losses), torch.cat(rights), torch.cat(asked)
        numbers = {"videos": len(videos), "loss": losses.mean().item()}
        for name, kind in WORDS.items():
            right = rights[asked == kind].float()
            numbers |= {f"{name}_words": right.mean().item(), f"{name}_asked": len(right)}
        if differ:
            tokens, reads = zip(*differ)
            numbers |= {"tokens_differ": sum(map(float, tokens)) / len(differ),
                        "read_outs_differ": sum(map(float, reads)) / len(differ)}
        return numbers

    def step(self, optimizer=None) -> float:
        batch = self.batch(self.next_videos())
        loss, *_ = loss_of(self.narrator, batch)
        loss.backward()
        if optimizer:
            torch.nn.utils.clip_grad_norm_(self.parameters, CLIP)
            optimizer.step()
        for p in self.parameters:
            p.grad = None
        return loss.detach()

    def wait(self) -> None:
        if self.device == "cuda":
            torch.cuda.synchronize()

    def run(self) -> None:
        args, kitchens = self.args, self.kitchens
        work = args.work
        self.write(when="start", **self.measures(kitchens.test[:LOOKED]))
        # how fast? Some steps that change nothing, while all rows run
        for _ in range(args.trial):
            self.step()
        self.wait()
        (work / f"ready-{self.name}").touch()
        patience = time.time() + 25
        while len(list(work.glob("ready-*"))) < args.of_rows and time.time() < patience:
            time.sleep(0.02)
        begin, count = time.time(), 0
        while time.time() < begin + args.timing:
            self.step()
            self.wait()
            count += 1
        new = work / f"new-{self.name}"
        new.write_text(str((time.time() - begin) / count))
        os.replace(new, work / f"pace-{self.name}")
        while not (work / "steps").exists():
            time.sleep(0.02)
        steps = int((work / "steps").read_text())
        self.generator.manual_seed(0)
        self.order = []

        optimizer = torch.optim.AdamW(self.parameters, lr=RATE, weight_decay=0.0,
                                      fused=self.device == "cuda")
        total, since, done = 0, 0, 0
        begin = time.time()
        for step in range(steps):
            for group in optimizer.param_groups:
                group["lr"] = RATE * schedule(step, steps, WARMUP)
            total, since = total + self.step(optimizer), since + 1
            done = step + 1
            if done % max(1, steps // LOOKS) == 0 or done % 50 == 0 or done == steps:
                look = {}
                if done % max(1, steps // LOOKS) == 0 and done < steps:
                    look = self.measures(kitchens.test[:LOOKED])
                self.write(when="training", step=done, steps=steps, training_loss=float(total) / since,
                           step_seconds=round((time.time() - begin) / done, 4), **look)
                total, since = 0, 0
            if time.time() - args.begun > args.seconds - 10:
                break
        device = torch.cuda.get_device_name() if self.device == "cuda" else "cpu"
        memory = torch.cuda.max_memory_allocated() / 2 ** 30 if self.device == "cuda" else 0
        self.write(when="end", steps=steps, done=done, passes=done * args.batch, batch=args.batch,
                   train_videos=len(kitchens.train), rate=RATE, device=device, torch=torch.__version__,
                   gib=round(memory, 1), layers=len(self.narrator.llm.model.layers),
                   **self.measures(kitchens.test))


# ------------------------------------------------------------------ the command

def check(args: argparse.Namespace, name: str) -> None:
    """Loss and gradients of a batch against `Narrator.loss` of each video."""
    row = Row(args, name)
    narrator = row.narrator
    torch.manual_seed(1)
    for parameter_name, p in narrator.named_parameters():
        if "lora_B" in parameter_name:
            torch.nn.init.normal_(p, std=0.02)
    chosen = row.kitchens.train[:3]
    loss, *_ = loss_of(narrator, row.batch(chosen))
    loss.backward()
    fast = [p.grad.clone() for p in row.parameters]
    for p in row.parameters:
        p.grad = None
    expected = 0
    texts = narrator.layout.tokenizer.texts
    for index in chosen:
        kitchen_seed = world.SEEDS["train"][index - args.test]
        rng = np.random.default_rng((kitchen_seed, 0))
        kitchen = world.Kitchen(kitchen_seed, int(rng.integers(*np.add(world.SEGMENTS, (0, 1)))))
        said = [(n.frame, texts[" " + n.text][0]) for n in kitchen.narrations]
        total, learned = narrator.loss(row.kitchens.of(index).float(), said)
        expected = expected + total / learned / len(chosen)
    expected.backward()
    largest = max((p.grad - g).abs().max() / p.grad.abs().max().clamp_min(1e-6)
                  for p, g in zip(row.parameters, fast))
    print(name, "loss", loss.item(), expected.item(), "largest relative difference of a gradient",
          largest.item(), flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("parts", type=Path)
    parser.add_argument("--output", type=Path)
    parser.add_argument("--work", type=Path, required=True)
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--seconds", type=float, default=262)
    parser.add_argument("--begun", type=float, default=0.0)
    parser.add_argument("--commit", default="")
    parser.add_argument("--of-rows", type=int, default=1)
    parser.add_argument("--videos", type=int, default=4000)
    parser.add_argument("--test", type=int, default=TEST)
    parser.add_argument("--encoders", type=int, default=14)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--trial", type=int, default=5)
    parser.add_argument("--timing", type=float, default=6)
    parser.add_argument("--layers", type=int, default=None)
    parser.add_argument("--encode", type=int, default=None)
    parser.add_argument("--row", default=None)
    parser.add_argument("--check", default=None)
    args = parser.parse_args()
    torch.set_num_threads(1)
    if args.encode is not None:
        write_kitchens(args, args.encode)
    elif args.row is not None:
        Row(args, args.row).run()
    else:
        check(args, args.check)


if __name__ == "__main__":
    main()

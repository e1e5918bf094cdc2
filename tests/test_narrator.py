"""The narrator (§3.1, 3.2, 3.5): layout, visibility rule, LoRA, frame tokens."""
import json
import subprocess
import sys

import pytest
import torch
from safetensors.torch import save_file
from transformers import LlamaConfig, LlamaForCausalLM, SiglipVisionConfig, SiglipVisionModel

import narrator as nar
from baselines.variants import load_narrator
from commands import narrator as narrator_command
from helpers import GOLDEN, ROOT, grouped, tiny, video
from support.common.errors import BadData
from support.engine import checkpoint
from support.engine.lora import LoRALinear, add_lora
from support.files.features import letterbox

needs_golden = pytest.mark.skipif(not GOLDEN.exists(), reason="../shared/golden is not there")


# ------------------------------------------------------------------ layout

def spell(layout, tokens):
    return ["x" if i == nar.FRAME else "m" if i == nar.MEMORY else layout.tokenizer.decode([i]) for i in tokens.ids]


def test_layout_is_the_one_of_the_paper():
    layout = tiny(memory_tokens=3).layout
    layout.J = 2
    tokens = layout.sequence([(0, layout.encode(" You look.")), (2, layout.encode(" You wipe."))])
    text = "".join(spell(layout, tokens))
    assert text == (f"<|begin_of_text|>{nar.SYSTEM}\n\n[xx]\nUser: {nar.INSTRUCTION}\nAssistant: You look.<|eot_id|>"
                    f"\n[mmm]\n[xx,xx]\nAssistant: You wipe.<|eot_id|>")


def test_the_narration_memory_comes_first():
    """[ n*N ], then [ m*M ], both visual: they go with their segment."""
    layout = tiny(memory_tokens=3, narration_memory=2, last_k=0).layout
    opening = layout.opening(1)
    assert narrator_command.spell(layout, opening) == ["$", "\\n", "[", "n", "n", "]\\n", "[", "m", "m", "m", "]\\n", "["] + ["x"] * 10
    assert set(opening.kind[2:]) == {nar.VISUAL} and not any(opening.learn[1:])


def test_pieces_are_what_streaming_feeds():
    layout = tiny(memory_tokens=3).layout
    ids = layout.encode(" You wash the red cup.")
    streamed = (layout.first() + layout.closing(0) + layout.narration(0, ids) + layout.opening(1) + layout.frame(1)
                + layout.closing(1) + layout.narration(1, ids) + layout.end_of_text(1))
    assert streamed == layout.sequence([(0, ids), (2, ids)])


def test_what_is_learned():
    """Not frame 0's trigger; for every later frame [SKIP] or "]", predicted from its last token; narrations and EOT."""
    layout = tiny().layout
    tokens = layout.sequence([(0, layout.encode(" You look.")), (3, layout.encode(" You wipe the sink."))])
    before = [tokens.ids[p - 1] for p, learn in enumerate(tokens.learn) if learn and tokens.ids[p - 1] < 0]
    targets = [tokens.ids[p] for p, learn in enumerate(tokens.learn) if learn and tokens.ids[p - 1] < 0]
    assert before == [nar.FRAME] * 3 and targets == [layout.skip] * 2 + [layout.close[0]]
    learned = "".join(layout.tokenizer.decode([i]) for i, learn in zip(tokens.ids, tokens.learn) if learn)
    assert learned == "Assistant: You look.<|eot_id|>,,]\nAssistant: You wipe the sink.<|eot_id|>"


def test_narrations_must_come_in_order():
    layout = tiny().layout
    for wrong in ([], [(1, [5])], [(0, [5]), (0, [5])], [(0, [5]), (3, [5]), (2, [5])]):
        with pytest.raises(ValueError):
            layout.sequence(wrong)


@needs_golden
def test_layout_is_what_the_published_code_streams():
    tokenizer = checkpoint.load_llm(str(GOLDEN / "base_llm"))[1]
    layout = nar.Layout(tokenizer, 10, 20)
    record = json.loads((GOLDEN / "flownar" / "streaming.json").read_text())["video_101"]["two_threshold_0.8_0.5"]
    published = [i for i in record["prompt_ids"] if i < tokenizer.vocab_size or i in tokenizer.all_special_ids]
    assert [i for i in layout.first().ids if i >= 0] == published + layout.newline


# ------------------------------------------------------------------ the visibility rule (Fig. 4)

@pytest.mark.parametrize("last_k", [None, 0, 1, 2])
def test_visible_is_the_rule(last_k):
    layout = tiny(memory_tokens=2).layout
    tokens = layout.sequence([(0, [5, 6]), (2, [7]), (3, [8, 9]), (6, [5])])
    mask = nar.attention_mask(tokens, last_k)
    for i in range(len(tokens)):
        for j in range(len(tokens)):
            segment = tokens.segment[i]
            kept = (tokens.kind[j] == nar.PROMPT
                    or tokens.kind[j] == nar.VISUAL and tokens.segment[j] == segment
                    or tokens.kind[j] == nar.NARRATION and (last_k is None or tokens.number[j] >= segment - last_k
                                                            or tokens.segment[j] == segment))
            assert mask[i, j] == (j <= i and kept), (i, j)
    assert mask.diagonal().all()


def test_without_pruning_causal():
    tokens = tiny().layout.sequence([(0, [5]), (2, [6])])
    assert torch.equal(nar.attention_mask(tokens, prune=False), torch.ones(len(tokens), len(tokens)).tril().bool())


def test_hidden_frames_have_no_influence():
    """Without memory and past narrations, other frames change their own segment and nothing after it."""
    model = tiny(memory="none", last_k=0)
    x, narrations = video(model, frames=17, at=(0, 4, 8, 12, 16))
    with torch.no_grad():
        before, _, tokens = model(x, narrations)
        x[1:5] += 1
        after, _, _ = model(x, narrations)
    segment = torch.tensor(tokens.segment)
    assert not torch.allclose(before[segment == 1], after[segment == 1], atol=1e-3)
    assert torch.allclose(before[segment != 1], after[segment != 1], atol=1e-5)


# ------------------------------------------------------------------ settings

@pytest.mark.parametrize("name, value", [
    ("fps", 0), ("fps", float("nan")), ("theta", 1.7), ("theta_low", -0.1), ("last_k", -3), ("memory_heads", 0),
    ("memory_heads", 3), ("memory_tokens", 0), ("grid", -1), ("width", -1), ("refractory", -1), ("lora_rank", 0),
    ("refractory", float("inf")), ("max_new_tokens", 0), ("memory", None), ("memory", 5), ("memory", "clamm"),
    ("narration_memory", -1), ("narration_memory", None),
    ("readout", "last"), ("prune", 1), ("last_k", 2.5), ("fps", True), ("lora_dropout", 2), ("llm", None)])
def test_every_setting_is_checked(name, value):
    with pytest.raises(BadData, match=name):
        nar.Config(**{name: value})


def test_last_k_needs_pruning():
    """last_k without pruning is an error, never silently without effect."""
    with pytest.raises(BadData, match="last_k = 2"):
        nar.Config(memory="none", prune=False, last_k=2)


@pytest.mark.parametrize("last_k, prune", [(None, True), (2, True), (0, False), (None, False)])
def test_a_narration_memory_stands_for_past_narrations(last_k, prune):
    with pytest.raises(BadData, match="last_k = ") as caught:
        nar.Config(narration_memory=4, last_k=last_k, prune=prune)
    assert "\n" not in str(caught.value)


def test_a_narration_memory_needs_heads_that_fit():
    with pytest.raises(BadData, match="narration_memory: width 128 is not a multiple of twice 3 heads"):
        tiny(width=12, memory_heads=3, narration_memory=4, last_k=0)


@pytest.mark.parametrize("start", ["start_published", "initialise"])
def test_a_narration_memory_starts_with_several_sentences(start):
    """What was said three narrations ago makes a difference, and its tokens are of the size of words."""
    model = tiny(narration_memory=4, last_k=0, memory_target=start == "initialise")
    model.start_published() if start == "start_published" else model.initialise(torch.randn(50, 10, 32))
    wash, wipe = (model.layout.encode(f" You {word} the red cup.") for word in ("wash", "wipe"))
    size = lambda y: float(y.square().mean() ** 0.5)
    with torch.no_grad():
        one, two = (model.narration_memory(*model.embed_narrations([(0, first), (3, wipe), (6, wipe), (9, wipe)]))[0][0, -1]
                    for first in (wash, wipe))
    assert size(one) == pytest.approx(size(model.llm.get_input_embeddings().weight), rel=0.2)
    assert size(one - two) > 0.02 * size(one) and size(one[1:] - one[:-1]) > 0.1 * size(one)


def test_nothing_is_on_another_device():
    """On meta tensors, which refuse to meet tensors of the CPU: the parallel form, CLAM's forms, the memories."""
    for memory in nar.MEMORIES:
        model = tiny(memory=memory, narration_memory=2, last_k=0).to("meta")
        x, narrations = video(model)
        loss, learned = model.loss(x.to("meta"), narrations)
        assert loss.device.type == "meta" and learned > 0
        state = model.memory.step(torch.zeros(1, 10, 32, device="meta"), model.memory.initial_state().to("meta"))
        assert model.memory.read(state).device.type == "meta"


# ------------------------------------------------------------------ LoRA

def test_a_training_step_over_a_bf16_base_with_grouped_queries(tmp_path):
    """LoRA, connector and memory stay fp32 and learn; saved and loaded they are the same."""
    model = tiny(llm=grouped(torch.bfloat16))
    x, narrations = video(model)
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    loss, _ = model.loss(x, narrations)
    loss.backward()
    optimizer.step()
    assert loss.isfinite() and all(p.dtype == torch.float32 for p in model.trainable().values())
    assert sum(not torch.equal(p, before[name]) for name, p in model.trainable().items()) > 0.9 * len(before)
    model.llm.config.save_pretrained(tmp_path / "llm")
    base = {name.replace("base_layer.", ""): p for name, p in model.llm.state_dict().items() if "lora_" not in name}
    save_file({name: p.contiguous() for name, p in base.items()}, tmp_path / "llm" / "model.safetensors")
    model.layout.tokenizer.save_pretrained(tmp_path / "llm")
    model.save(tmp_path, llm="llm")
    again = load_narrator(str(tmp_path), dtype=torch.bfloat16)
    with torch.no_grad():
        assert torch.equal(model(x, narrations)[0], again(x, narrations)[0])


def test_lora_starts_as_nothing_and_is_all_linear_layers():
    torch.manual_seed(0)
    llm = LlamaForCausalLM(LlamaConfig(vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2,
                                       num_attention_heads=2)).eval()
    ids = torch.arange(8)[None]
    with torch.no_grad():
        before = llm(ids).logits
        add_lora(llm, rank=4, alpha=8, dropout=0.0)
        assert torch.equal(llm(ids).logits, before)
    wrapped = [name for name, module in llm.named_modules() if isinstance(module, LoRALinear)]
    assert len(wrapped) == 2 * 7 + 1 and "lm_head" in wrapped
    layer = llm.model.layers[0].self_attn.q_proj
    torch.nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(3, 16)
    expected = x @ layer.base_layer.weight.T + 2 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T
    assert torch.allclose(layer(x), expected, atol=1e-5)


def test_lora_computes_in_the_dtype_of_its_base():
    """All products of forward and backward in bf16, as the frozen layer's; weights and their gradients stay fp32."""
    layer = LoRALinear(torch.nn.Linear(64, 48).bfloat16(), 8, 16, 0.0)
    torch.nn.init.normal_(layer.lora_B.weight)
    x, g = torch.randn(20, 64).bfloat16().requires_grad_(), torch.randn(20, 48).bfloat16()
    dtypes = []

    class Products(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            if function.overloadpacket in (torch.ops.aten.mm, torch.ops.aten.addmm):
                dtypes.extend(arg.dtype for arg in args if isinstance(arg, torch.Tensor))
            return function(*args, **(kwargs or {}))

    with Products():
        y = layer(x)
        y.backward(g)
    assert set(dtypes) == {torch.bfloat16} and len(dtypes) >= 2 * 8 and y.dtype == torch.bfloat16
    A, B = (weight.detach().requires_grad_() for weight in (layer.lora_A.weight, layer.lora_B.weight))
    update = x.detach().float() @ A.T @ B.T * 2
    update.backward(g.float())
    assert (y - layer.base_layer(x) - update).norm() < 0.02 * update.norm()
    for weight, expected in ((layer.lora_A.weight, A.grad), (layer.lora_B.weight, B.grad)):
        assert weight.dtype == weight.grad.dtype == torch.float32
        assert (weight.grad - expected).norm() < 0.02 * expected.norm()


@pytest.mark.parametrize("shape", [(20, 64), (2, 10, 64)])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("dropout", [0.0, 0.3, 1.0])
def test_lora_and_its_gradients(dropout, bias, shape):
    """Those of the formula, with dropout as well: the layer draws the same random numbers."""
    torch.manual_seed(0)
    layer = LoRALinear(torch.nn.Linear(64, 48, bias=bias), 8, 16, dropout)
    torch.nn.init.normal_(layer.lora_B.weight)
    x, g, results = torch.randn(shape), torch.randn(*shape[:-1], 48), []
    for ours in (True, False):
        leaves = x.clone().requires_grad_(), *(y.weight for y in (layer.lora_A, layer.lora_B))
        torch.manual_seed(1)
        if ours:
            y = layer(leaves[0])
        else:
            kept = (torch.rand(shape) >= dropout) / (1 - dropout or 1)
            y = layer.base_layer(leaves[0]) + 2 * (leaves[0] * kept) @ leaves[1].T @ leaves[2].T
        results.append([y, *torch.autograd.grad(y, leaves, g)])
    assert all(torch.allclose(*pair, rtol=1e-4, atol=1e-4) for pair in zip(*results))
    layer.eval()
    assert torch.allclose(layer(x), layer.base_layer(x) + 2 * x @ layer.lora_A.weight.T @ layer.lora_B.weight.T,
                          rtol=1e-4, atol=1e-4)


def test_only_adapter_connector_and_memory_learn():
    model = tiny()
    x, narrations = video(model)
    model.loss(x, narrations)[0].backward()
    learned = {name for name, p in model.named_parameters() if p.grad is not None}
    assert learned and all("lora_" in name or name.startswith(("connector.", "memory.")) for name in learned)
    assert {name.split(".")[0] for name in learned} == {"llm", "connector", "memory"}


# ------------------------------------------------------------------ frame tokens

def vision_folder(path, size=32):
    torch.manual_seed(0)
    model = SiglipVisionModel(SiglipVisionConfig(hidden_size=16, intermediate_size=32, num_hidden_layers=1,
                                                 num_attention_heads=2, image_size=size, patch_size=8))
    model.save_pretrained(path)
    (path / "preprocessor_config.json").write_text(json.dumps({"image_mean": [0.5] * 3, "image_std": [0.25] * 3}))
    return model.eval()


def test_frame_tokens_are_cls_and_pooled_patches(tmp_path):
    model = vision_folder(tmp_path, size=48)                     # 6 x 6 patches
    encoder = nar.VisionEncoder(str(tmp_path), grid=3)
    frame = torch.randint(0, 256, (1, 48, 48, 3), dtype=torch.uint8)
    x = encoder(frame)
    assert x.shape == (1, 10, 16)
    with torch.no_grad():
        output = model(pixel_values=(frame.movedim(3, 1) / 255 - 0.5) / 0.25)
    assert torch.allclose(x[:, 0], output.pooler_output, atol=1e-5)
    patches = output.last_hidden_state.view(6, 6, 16)
    assert torch.allclose(x[0, 1 + 3 + 2], patches[2:4, 4:6].mean((0, 1)), atol=1e-5)   # row 1, column 2


def test_without_pooled_patches_a_frame_is_its_cls_token(tmp_path):
    vision_folder(tmp_path)
    frames = torch.randint(0, 256, (2, 32, 32, 3), dtype=torch.uint8)
    alone, whole = (nar.VisionEncoder(str(tmp_path), grid=grid)(frames) for grid in (0, 3))
    assert alone.shape == (2, 1, 16) and torch.equal(alone, whole[:, :1]) and nar.Config(grid=0).J == 1


def test_letterbox_keeps_the_aspect_ratio():
    frames = torch.ones(2, 30, 60, 3)
    square = letterbox(frames, 20)
    assert square.shape == (2, 3, 20, 20)
    assert square[:, :, 5:15].min() == 1 and square[:, :, :5].max() == 0 and square[:, :, 15:].max() == 0


def command(*arguments):
    return subprocess.run([sys.executable, "narrator.py", *map(str, arguments)], cwd=ROOT, capture_output=True,
                          text=True)


def test_draws_figure_4(tmp_path):
    run = command("--last-k", "1", "--png", tmp_path / "mask.png")
    assert run.returncode == 0, run.stderr
    assert run.stdout.count("■") > 100 and (tmp_path / "mask.png").stat().st_size > 5000
    assert "segment " in run.stdout and "A: Assistant:" in run.stdout


def test_lists_the_tokens(monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", ["narrator.py", "--tokens", "--last-k", "1"])
    with pytest.raises(SystemExit) as end:
        narrator_command.main()
    rows = [line.split() for line in capsys.readouterr().out.splitlines() if line[:8].strip().isdigit()]
    assert not end.value.code
    assert [row[0] for row in rows] == [str(i) for i in range(33)] and rows[15][1:4] == ["[SKIP]", "1", "visual"]
    # (renumbered, it would be 4)
    assert rows[11][-1] == "removed" and rows[7][-1] == "removed" and rows[31][-1] == "4)"

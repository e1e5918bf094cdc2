"""The narrator (§3.1, 3.2, 3.5): layout, visibility rule, LoRA, frame tokens."""
import json
import re
import shutil

import pytest
import torch
from transformers import (
    ConvNextConfig, ConvNextModel, SiglipVisionConfig, SiglipVisionModel, SwinConfig, SwinModel,
)

import narrator as nar
from beyond.commands import drawing
from helpers import TOY, grouped, tiny, video
from stream import narrate
from support.common.errors import BadData
from support.engine import attention
from support.engine.frozen import load_tokenizer
from support.engine.lora import LoRALinear
from support.engine.registry import make_config
from support.engine.pictures import letterbox
from test_commands import outcome


def decode(layout, ids):
    placeholders = {nar.FRAME: "x", nar.MEMORY: "m"}
    return "".join(placeholders.get(i) or layout.tokenizer.decode([i]) for i in ids)


def test_layout_is_the_one_of_the_paper():
    layout = nar.Layout(tiny().layout.tokenizer, J=2, M=3)
    look = layout.encode(" You look.")
    wipe = layout.encode(" You wipe.")
    tokens = layout.sequence([(0, look), (2, wipe)])
    assert decode(layout, tokens.ids) == (
        f"<|begin_of_text|>{nar.SYSTEM}\n\n"
        f"[xx]\nUser: {nar.INSTRUCTION}\nAssistant: You look.<|eot_id|>\n"
        f"[mmm]\n[xx,xx]\nAssistant: You wipe.<|eot_id|>"
    )


def test_the_narration_memory_comes_first():
    """[ n*N ], then [ m*M ], both visual: they go with their segment."""
    layout = tiny(memory_tokens=3, narration_memory=2, last_k=0).layout
    opening = layout.opening(1)
    expected = "$ \\n [ n n ]\\n [ m m m ]\\n [".split() + ["x"] * 10
    assert drawing.spell(layout, opening) == expected
    assert set(opening.kind[2:]) == {nar.VISUAL} and not any(opening.learn[1:])


@pytest.mark.parametrize("frames", [(), (1,), (0, 0), (0, 3, 2)])
def test_narrations_must_come_in_order(frames):
    narrations = [(frame, [5]) for frame in frames]
    narrator = tiny()
    with pytest.raises(AssertionError, match="frame"):
        narrator.layout.sequence(narrations)
    with pytest.raises(AssertionError, match="frame"):
        narrator(torch.zeros(5, narrator.config.J, narrator.config.width), narrations)


@pytest.mark.parametrize("shape", [(9, 64), (10, 1, 64), (1, 10, 64), (10, 1)])
def test_the_tokens_of_a_streamed_frame_have_their_shape(shape):
    with pytest.raises(AssertionError, match="J, D"):
        next(narrate(tiny(), [torch.zeros(shape)]))


def test_a_narration_that_is_given_beyond_the_video_is_not_lost():
    with pytest.raises(AssertionError, match="has its frame"):
        list(narrate(tiny(), torch.zeros(3, 10, 32), given={0: [], 3: []}))


@pytest.mark.parametrize("asked, decoded", [
    (True, "the man's cup. you don't, and they're there!"),
    (False, "the man 's cup . you do n't , and they 're there !"),
])
def test_spaces_are_cleaned_up_as_published(tmp_path, capfd, asked, decoded):
    """Where the tokenizer's settings ask for it: as transformers 4.43 did, today's does not."""
    shutil.copytree(TOY / "llm", tmp_path, dirs_exist_ok=True)
    file = tmp_path / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    file.write_text(json.dumps(settings | {"clean_up_tokenization_spaces": asked}))
    layout = nar.Layout(load_tokenizer(str(tmp_path)), 1, 1)
    ids = layout.encode(" the man 's cup . you do n't , and they 're there !")
    assert layout.decode([*ids, layout.eot]) == decoded
    assert capfd.readouterr().err == ""


def test_skip_is_a_token_that_is_known():
    tokenizer = load_tokenizer(str(TOY / "llm"))
    tokenizer.unk_token = ","
    with pytest.raises(BadData, match="does not know ','"):
        nar.Layout(tokenizer, 1, 1)


@pytest.mark.parametrize("name, value", [
    # out of range
    ("fps", float("nan")), ("theta", 1.7), ("theta_low", -0.1), ("last_k", -3), ("grid", -1),
    ("memory_tokens", 0), ("refractory", float("inf")), ("lora_dropout", 2), ("max_segment", 0.0),
    # of another type, or none of the choices
    ("memory", "clamm"), ("prune", 1), ("last_k", 2.5), ("fps", True), ("llm", None),
    # heads that do not divide the width
    ("memory_heads", 3),
])
def test_every_setting_is_checked(name, value):
    with pytest.raises(BadData, match=name):
        make_config(**{name: value})


@pytest.mark.parametrize("settings, message", [
    ({"memory": "none", "prune": False, "last_k": 2}, "last_k = 2"),
    ({"memory": "none", "prune": False, "max_segment": 30.0}, "max_segment"),
    ({"max_position": 230, "last_k": 1, "keep_newline": True}, "max_position needs"),
    ({"theta": 0.3}, "theta_low = 0.5: is above"),
    # a narration memory stands for past narrations, and divides the language model's width
    ({"narration_memory": 4, "last_k": 2}, "last_k = 2"),
    ({"narration_memory": 4, "last_k": 0, "width": 12, "memory_heads": 3}, "twice 3 heads"),
    # routers are of VideoLLM-online alone
    ({"memory": "none", "prune": False, "mod_keep": 0}, "from 1e-09 to 1"),
    ({"memory": "none", "prune": False, "mod_keep": True}, "cannot be"),
    ({"memory": "clam", "prune": False, "mod_keep": 0.2}, "has no memory"),
    ({"memory": "none", "mod_keep": 0.2}, "prunes nothing"),
    ({"memory": "none", "mod_keep": 0.2, "narration_memory": 4, "last_k": 0}, "together"),
], ids=str)
def test_settings_that_contradict_each_other(settings, message):
    with pytest.raises(BadData, match=message):
        tiny(**settings)


def test_nothing_is_on_another_device():
    """On meta tensors, which refuse to meet tensors of the CPU: the parallel form, all memories."""
    model = tiny(narration_memory=2, last_k=0).to("meta")
    x, narrations = video(model, frames=6, at=(0, 2, 5))
    loss, learned = model.loss(x.to("meta"), narrations)
    assert loss.device.type == "meta" and learned > 0
    for name, memory_class in nar.MEMORIES.items():
        config = make_config(memory=name, width=32, memory_tokens=10, memory_heads=2)
        memory = memory_class.from_config(config).to("meta")
        frames = torch.zeros(1, 20, 32, device="meta")
        tokens, _ = memory(frames, torch.tensor([[10, 20]]))
        state = memory.step(frames, memory.initial_state().to("meta"))
        assert tokens.device.type == memory.read(state).device.type == "meta"


def test_a_training_step_over_a_bf16_base_with_grouped_queries():
    model = tiny(llm=grouped(torch.bfloat16))
    x, narrations = video(model)
    optimizer = torch.optim.AdamW(model.trainable().values(), lr=1e-2)
    before = {name: p.detach().clone() for name, p in model.trainable().items()}
    loss, _ = model.loss(x, narrations)
    loss.backward()
    optimizer.step()
    assert loss.isfinite()
    assert {name.split("lora_")[0] == name for name, p in model.llm.named_parameters()
            if p.grad is not None} == {False}               # the base is frozen
    changed = [name for name, p in model.trainable().items() if not torch.equal(p, before[name])]
    assert len(changed) > 0.9 * len(before)
    assert {p.dtype for p in model.trainable().values()} == {torch.float32}


@pytest.mark.parametrize("dtype, tolerance", [(torch.float32, 1e-5), (torch.bfloat16, 0.02)])
@pytest.mark.parametrize("bias", [False, True])
def test_lora_and_its_gradients(bias, dtype, tolerance):
    """Those of the formula. Weights and their gradients are in fp32, whatever the base is in."""
    torch.manual_seed(0)
    base = torch.nn.Linear(64, 48, bias=bias).to(dtype)
    layer = LoRALinear(base, rank=8, alpha=16, dropout=0.0)
    torch.nn.init.normal_(layer.lora_B.weight)
    x = torch.randn(2, 10, 64).to(dtype)
    output = layer(x)
    assert output.dtype == dtype
    gradient = torch.randn(2, 10, 48).to(dtype)
    output.backward(gradient)

    A = layer.lora_A.weight.detach().requires_grad_()
    B = layer.lora_B.weight.detach().requires_grad_()
    expected = x.float() @ A.T @ B.T * 2
    expected.backward(gradient.float())
    assert (output - base(x) - expected).norm() < tolerance * expected.norm()
    for weight, gradient in ((layer.lora_A.weight, A.grad), (layer.lora_B.weight, B.grad)):
        assert weight.grad.dtype == torch.float32
        assert (weight.grad - gradient).norm() < tolerance * gradient.norm()
    layer.dropout.p = 1.0                       # it is of LoRA alone
    assert torch.equal(layer.train()(x), base(x))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_merged_lora_is_lora(dtype):
    llm = grouped(dtype)
    llm.lm_head.weight = llm.get_input_embeddings().weight
    model = tiny(llm=llm).eval()
    table = model.llm.get_input_embeddings().weight
    words = table.clone()
    ids = torch.arange(30)
    mask = torch.ones(30, 30, dtype=torch.bool).tril()
    with torch.no_grad():
        before = model.logits(model.run(model.embed(ids), ids, mask))
        model.merge()
        after = model.logits(model.run(model.embed(ids), ids, mask))
    assert (after - before).norm() < (1e-5 if dtype == torch.float32 else 0.02) * before.norm()
    assert torch.equal(table, words)
    assert model.llm.lm_head.weight is not table


def test_the_loss_in_parts_is_the_whole():
    torch.manual_seed(0)
    head = torch.nn.Linear(16, 50)
    hidden = torch.randn(70, 16, requires_grad=True)
    labels = torch.randint(50, (70,))
    results = []
    for loss in (attention.cross_entropy(head, hidden, labels, rows=32),
                 torch.nn.functional.cross_entropy(head(hidden), labels, reduction="sum")):
        results.append([loss, *torch.autograd.grad(loss, [hidden, head.weight])])
    for one, other in zip(*results):
        assert torch.allclose(one, other, atol=1e-5)


SMALL = {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1,
         "num_attention_heads": 2, "image_size": 48, "patch_size": 8}         # 6 x 6 patches


def save_vision(model, path):
    model.save_pretrained(path)
    statistics = {"image_mean": [0.5] * 3, "image_std": [0.25] * 3}
    (path / "preprocessor_config.json").write_text(json.dumps(statistics))


def test_frame_tokens_are_cls_and_pooled_patches(tmp_path):
    model = SiglipVisionModel(SiglipVisionConfig(**SMALL)).eval()
    save_vision(model, tmp_path)
    encoder = nar.VisionEncoder(str(tmp_path), grid=3)
    frame = torch.randint(0, 256, (1, 48, 48, 3), dtype=torch.uint8)
    x = encoder(frame)
    assert x.shape == (1, 10, 16)
    for wrong in (frame / 255, frame[..., :1], frame.movedim(3, 1)):
        with pytest.raises(BadData, match="uint8, from 0 to 255, not"):
            encoder(wrong)
    with torch.no_grad():
        output = model(pixel_values=(frame.movedim(3, 1) / 255 - 0.5) / 0.25)
    assert torch.allclose(x[:, 0], output.pooler_output, atol=1e-5)
    assert torch.equal(x[:, :1], nar.VisionEncoder(str(tmp_path), grid=0)(frame))
    patches = output.last_hidden_state.view(6, 6, 16)
    row_1_column_2 = patches[2:4, 4:6].mean((0, 1))
    assert torch.allclose(x[0, 1 + 3 + 2], row_1_column_2, atol=1e-5)


def test_other_vision_models_are_refused(tmp_path):
    swin = SwinConfig(embed_dim=8, depths=[1, 1], num_heads=[1, 1], image_size=32, patch_size=4, window_size=2)
    for model, message in (
        (SiglipVisionModel(SiglipVisionConfig(**SMALL, vision_use_head=False)), "no pooled output"),
        (SwinModel(swin), "no token for each patch"),
        (ConvNextModel(ConvNextConfig(hidden_sizes=[8] * 4, depths=[1] * 4)), "has no hidden_size"),
    ):
        save_vision(model, tmp_path)
        with pytest.raises(BadData, match=message):
            nar.VisionEncoder(str(tmp_path))(torch.zeros(1, 32, 32, 3, dtype=torch.uint8))


def test_letterbox_keeps_the_aspect_ratio():
    frames = torch.ones(2, 30, 60, 3)
    square = letterbox(frames, 20)
    assert square.shape == (2, 3, 20, 20)
    expected = [0] * 5 + [1] * 10 + [0] * 5
    assert square.amin((0, 1, 3)).tolist() == square.amax((0, 1, 3)).tolist() == expected


def rows_of(*options):
    code, out, _ = outcome(drawing, ["--last-k", "1", *options])
    assert code == 0
    return [line.split() for line in out.splitlines() if re.match(r" *\d+ ", line)]


def test_draws_figure_4():
    _, tokens = drawing.three_segments()
    mask = nar.attention_mask(tokens, 1).tolist()
    assert [[cell == "■" for cell in row[2:]] for row in rows_of()] == mask


def test_lists_the_tokens():
    rows = rows_of("--tokens")
    assert [row[0] for row in rows] == [str(i) for i in range(33)]
    assert rows[15][1:4] == ["[SKIP]", "1", "visual"]
    assert rows[7][-1] == rows[11][-1] == "removed"
    assert rows[31][-3:] == ["at", "31,", "still"]

"""CUDA: what a pretended device can show on any machine, and what only a GPU can (`pytest -m cuda`)."""
import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch._subclasses.fake_tensor import (
    DataDependentOutputException, FakeTensor, FakeTensorDeviceMismatchError, FakeTensorMode,
)

from helpers import ROOT, TOY, narrate, tiny, video
from narrator import Narrator
from streams.bounds import open_stream
from support.engine import attention, flex
from support.engine.shared import SharedRows
from support.files.features import open_frames
from test_golden import CUT, MODELS, features, load, read
from test_passes import MOD, assert_same, lively, together, trace
from test_suspend import suspended

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


# ---------------------------------------------------------------------- a pretended device


class Indexing(TorchFunctionMode):
    """tensor[index] by the operations that it consists of: Python's own asks for a real device."""

    def __torch_function__(self, function, types, args=(), kwargs=None):
        if function is not torch.Tensor.__getitem__:
            return function(*args, **(kwargs or {}))
        tensor, index = args
        dim = 0
        for entry in index if isinstance(index, tuple) else (index,):
            if entry is None:
                tensor = tensor.unsqueeze(dim)
                dim += 1
            elif isinstance(entry, int):
                tensor = tensor.select(dim, entry)
            elif isinstance(entry, slice):
                start, stop, step = entry.indices(tensor.shape[dim])
                tensor = torch.ops.aten.slice(tensor, dim, start, stop, step)
                dim += 1
            else:                                   # places: a tensor, the only entry
                assert index is entry
                tensor = torch.ops.aten.index(tensor, [entry])
        return tensor


class Pretended:
    """A GPU that is not there: tensors of the right shapes, dtypes and device, without numbers.

    An operation on tensors of two devices is an error, and so is whatever has to wait for a number.
    """

    def __init__(self):
        self.mode = FakeTensorMode(allow_non_fake_inputs=False)

    def tensor(self, tensor):
        if tensor is None:
            return None
        return FakeTensor(self.mode, torch.empty_like(tensor, device="meta"), torch.device("cuda"))

    def move(self, thing):
        """Move a module, or any object with tensors, lists or tuples of tensors, in place."""
        if isinstance(thing, torch.nn.Module):
            for module in thing.modules():
                for tensors in (module._parameters, module._buffers):
                    tensors.update({name: self.tensor(tensor) for name, tensor in tensors.items()})
            return
        for name, value in vars(thing).items():
            if isinstance(value, torch.Tensor):
                setattr(thing, name, self.tensor(value))
            elif isinstance(value, (list, tuple)):
                moved = [self.tensor(x) if isinstance(x, torch.Tensor) else x for x in value]
                setattr(thing, name, type(value)(moved))


def test_the_pretended_device_notices():
    pretended = Pretended()
    on_gpu = pretended.tensor(torch.ones(3))
    with pretended.mode:
        with pytest.raises(FakeTensorDeviceMismatchError):
            on_gpu + torch.ones(3)
        with pytest.raises(DataDependentOutputException):
            on_gpu.sum().item()


@pytest.mark.parametrize("changes", [{"last_k": 2}, MOD, {"last_k": 0, "narration_memory": 4}])
def test_a_pass_stays_on_the_device_and_waits_for_nothing(changes):
    """The pass of one stream, which is captured as a CUDA graph: of a frame, and of a word."""
    model, x = lively(**changes)
    model.merge()
    inputs = {}

    def run(pass_input):
        logits = model.decoder([pass_input])[0]
        inputs[pass_input.plan.shape[1]] = pass_input
        return logits

    trace(model, x[:12], context=open_stream(model, run=run))
    pretended = Pretended()
    pretended.move(model)
    pretended.move(model.decoder)
    for layer in model.decoder.layers:
        pretended.move(layer)
    cache = next(iter(inputs.values())).slots
    for slots in (cache, cache.routed):
        if slots is not None:
            pretended.move(slots)
    assert len(inputs) >= 3
    for pass_input in inputs.values():
        pretended.move(pass_input)
        with pretended.mode, Indexing(), torch.no_grad():
            logits = model.decoder.forward([pass_input])
        assert logits.device.type == "cuda"


def test_a_pass_of_several_streams_stays_on_the_device():
    """What is captured of it, for every number of tokens."""
    model, x = lively(last_k=2)
    model.merge()
    shared = SharedRows(model.decoder, capture=False)
    model.decoder.shared = shared
    together(model, [x[:12], x[6:20]], 2)
    pretended = Pretended()
    pretended.move(model)
    pretended.move(model.decoder)
    for layer in model.decoder.layers:
        pretended.move(layer)
    pretended.move(shared)
    assert len(shared.inputs) >= 2
    for N, inputs in shared.inputs.items():
        inputs = [pretended.tensor(tensor) for tensor in inputs]
        with pretended.mode, Indexing(), torch.no_grad():
            hidden = shared.forward(N, *inputs)
        assert hidden.device.type == "cuda" and len(hidden) == 2 * N


# ---------------------------------------------------------------------- a GPU


def on_gpu(test):
    """Mark a test that runs with `pytest -m cuda`, and is skipped where there is no GPU."""
    return pytest.mark.cuda(needs_gpu(test))


@on_gpu
@pytest.mark.parametrize("lookahead, changes", [
    (1, {"last_k": 2}),
    (4, {"last_k": 2}),
    (1, MOD),
    (4, MOD),
    (4, {"last_k": 0, "narration_memory": 4}),
    (1, {"grid": 0}),
])
def test_captured_passes(lookahead, changes):
    """Every shape is a captured graph; beside the plain path of the same model, on the same device."""
    model, x = lively(**changes)
    model.to("cuda")
    plain = trace(model, x, lookahead)
    model.merge()
    context = open_stream(model)
    assert_same(plain, trace(model, x, lookahead, context), 1e-4)
    assert len(context.cache.graphs) >= 5


@on_gpu
@pytest.mark.parametrize("merged", [False, True])
@pytest.mark.parametrize("name", MODELS)
def test_published_narrations(name, merged):
    """What the published implementation said, in fp32: through transformers' modules, and by captured passes."""
    model = load(name).to("cuda")
    if merged:
        model.merge()
    case = read(name, "streaming.json")["two_threshold_0.8_0.5"]
    steps = list(narrate(model, features()))
    narrated = [step for step in steps if step.narration]
    assert [step.frame for step in narrated] == case["narration_frames"]
    assert [step.narration.tokens + [model.layout.eot] for step in narrated] == case["output_ids"]
    probabilities = [step.p_skip for step in steps if step.frame]
    assert probabilities[:len(case["skip_prob"])] == pytest.approx(case["skip_prob"], abs=CUT)


@on_gpu
def test_the_bundled_narrator_from_pictures():
    """The first 60 frames of the kitchen, decoded, encoded and narrated on the GPU and on the processor."""
    sentences = []
    for device in ("cpu", "cuda"):
        model = Narrator.load(str(TOY), device=device).merge()
        kitchen = str(ROOT / "toy" / "kitchen.mp4")
        frames = open_frames(kitchen, model.config, model.vision_encoder(), 4)[0]
        x = [frame for frame, _ in zip(frames, range(60))]
        steps = list(narrate(model, x, lookahead=4))
        sentences.append([(step.frame, step.narration.text) for step in steps if step.narration])
    assert sentences[0] == sentences[1] and len(sentences[0]) > 5


@on_gpu
@pytest.mark.parametrize("changes", [{"last_k": 1}, {}, MOD, {"last_k": 0, "narration_memory": 4}])
@pytest.mark.parametrize("rectangles", [attention.rectangles, flex.block_mask])
def test_loss_and_gradients(changes, rectangles):
    """On the GPU in rectangles, or by FlexAttention."""
    results = []
    for device in ("cpu", "cuda"):
        model = tiny(**changes).to(device)
        if device == "cuda":
            model.rectangles = rectangles
        x, narrations = video(model)
        loss, learned = model.loss(x, narrations)
        (loss / learned).backward()
        gradients = {name: p.grad.cpu() for name, p in model.trainable().items() if p.grad is not None}
        results.append((loss.item(), learned, gradients))
    (loss, learned, gradients), (loss_gpu, learned_gpu, gradients_gpu) = results
    assert loss_gpu == pytest.approx(loss, rel=1e-4) and learned_gpu == learned
    assert gradients_gpu.keys() == gradients.keys()
    for name, gradient in gradients.items():
        assert torch.allclose(gradients_gpu[name], gradient, atol=1e-4, rtol=1e-3), name


@on_gpu
def test_streams_share_passes():
    model, _ = lively(last_k=2)
    model.to("cuda").merge()
    sources = [video(model, frames=frames, seed=frames)[0] for frames in (13, 40, 25)]
    for alone, beside in zip([trace(model, x) for x in sources], together(model, sources, 3)):
        assert_same(alone, beside, 1e-4)


@on_gpu
def test_a_stream_is_saved_and_goes_on():
    """The cache and the memory of a stream on the GPU, put into a new one."""
    model, x = lively(last_k=2)
    model.to("cuda").merge()
    whole = trace(model, x)
    first = open_stream(model)
    before = trace_until(model, x, first, 21)
    second = suspended(model, first)
    after = [row(step) for step in narrate(model, x[21:], context=second)]
    assert before + after == whole[1]


def row(step):
    return (step.frame, step.position, step.text_tokens, step.visual_tokens, step.pruned,
            step.narration and step.narration.tokens)


def trace_until(model, x, context, stop):
    """The first `stop` decisions of a stream, which then ends between two frames."""
    steps = narrate(model, x, context=context)
    return [row(next(steps)) for _ in range(stop)]

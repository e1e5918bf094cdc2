"""Memories alone: what the videos show is what is asked for."""
import torch

from beyond.experiments import alone


def test_videos_show_last_what_is_asked_for():
    """Of tokens that are the number of their thing: after its last frame with a thing a place is hidden,
    and it has shown another thing before, or it has not."""
    torch.manual_seed(0)
    thing = torch.arange(7.0)[None, :, None, None]
    tokens = thing.expand(4, 7, alone.EACH, 1)
    x, asked, is_another = alone.draw(tokens, 200)
    assert x.shape == (200, alone.FRAMES, 4, 1)
    assert not x[:, :, 0].any() and not x[:, -8:].any()
    for video, things, others in zip(x[..., 0].long(), asked, is_another):
        for place in (1, 2, 3):
            shown = [n for n in video[:, place].tolist() if n]
            assert shown[-1] == things[place]
            assert (len(set(shown)) == 2) == others[place]
    assert 0.4 < is_another[:, 1:].float().mean() < 0.6


def test_the_control_does_not_depend_on_the_token():
    """Two keys that are equal but for their input gates are written alike."""
    torch.manual_seed(0)
    memory = alone.MeanOfTied(16, 4, heads=2)
    x = torch.randn(2, 6, 16)
    k, v, log_gate = memory.project(x)
    plain, _, _ = alone.CLAM.project(memory, x)
    factor = k / plain
    torch.testing.assert_close(factor, factor[:1, :1].expand_as(factor))
    torch.testing.assert_close(factor[0, 0], (1 - log_gate.exp()).mean((0, 1)))

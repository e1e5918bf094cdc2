"""The sprites are those that the bundled narrator has seen."""
import pytest
from PIL import Image

from support.common.errors import BadData
from toy import paint
from toy.world import RGB

BLUE, YELLOW, WHITE = RGB[2], RGB[3], RGB[5]


@pytest.mark.parametrize("arguments, means", [
    (("open-fridge",), [112.211, 120.814, 125.937, 1.0]),
    (("open-drawer",), [94.064, 75.753, 58.826, 1.0]),
    (("open-cupboard",), [79.278, 67.345, 60.13, 1.0]),
    (("act",), [18.431, 13.786, 10.791, 0.101]),
    (("cup", BLUE), [17.427, 28.315, 64.526, 0.377]),
    (("knife", WHITE), [32.073, 32.142, 32.383, 0.181]),
    (("pan", YELLOW, paint.SMALL), [53.605, 45.438, 10.119, 0.328]),
], ids=str)
def test_sprites_stay_as_they_were(arguments, means):
    assert paint.sprite(*arguments).mean((0, 1)) == pytest.approx(means, abs=2e-3)


def test_another_size_is_refused(tmp_path, monkeypatch):
    smaller = tmp_path / "sprites.png"
    Image.open(paint.SPRITES).resize((800, 320)).save(smaller)
    monkeypatch.setattr(paint, "SPRITES", smaller)
    with pytest.raises(BadData, match="its size must be 1600 x 640"):
        paint.sheet.__wrapped__()              # what it read before is kept

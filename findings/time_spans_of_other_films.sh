#!/usr/bin/env bash
# Expected: in a batch of films with their own time spans between pictures, each film's answers follow its own spans.
# ncps lays the row of spans of a batch along the units: with as many films as units, film 1's span is that of unit 1 in
# all films, film 2's that of unit 2. A batch of 32 with 32 units is off from the films one by one by more than the spread
# (CfC), and other spans in film 2 move film 1. Without spans a batch is exact; 31 films for 32 units raise an error.
# Versions: ncps 1.0.1, torch 2.13.0.
# Who meets it: whoever trains CfC or LTC on streams with a varying rate, which `timespans` is for.
set -euo pipefail
place=$(mktemp -d)
trap 'rm -rf "$place"' EXIT
python3 -m venv "$place/venv"
"$place/venv/bin/pip" install --quiet torch==2.13.0 numpy==2.2.6 packaging==25.0 future==1.0.0
"$place/venv/bin/pip" install --quiet --no-deps ncps==1.0.1
"$place/venv/bin/python" - <<'PYTHON'
from importlib.metadata import version
import torch
from ncps.torch import LTC, CfC

print("ncps", version("ncps"), "torch", torch.__version__)
torch.set_grad_enabled(False)
torch.set_num_threads(1)
generator = torch.Generator().manual_seed(1)
films = torch.randn(32, 10, 5, generator=generator)
spans = 0.1 + 3 * torch.rand(32, 10, 1, generator=generator)
other = spans.clone()
other[1] = 4 - other[1]
found = {}
for kind in (CfC, LTC):
    torch.manual_seed(0)
    model = kind(5, 32).eval()
    batch = model(films, timespans=spans)[0]
    alone = torch.cat([model(film[None], timespans=span[None])[0] for film, span in zip(films, spans)])
    even = (model(films)[0] - torch.cat([model(film[None])[0] for film in films])).abs().max().item()
    moved = (model(films, timespans=other)[0] - batch).abs().amax((1, 2))
    unit = (model(films, timespans=other)[0] - batch).abs()[0, 0].nonzero().flatten().tolist()
    try:
        model(films[:31], timespans=spans[:31])
        error = None
    except RuntimeError as failure:
        error = str(failure)
    found[kind.__name__] = (batch - alone).abs().max().item(), even, moved[0].item(), unit, error
    print(f"{kind.__name__}: a batch of 32 is off from the films alone by up to {found[kind.__name__][0]:.2f} (spread",
          f"{alone.std():.2f}), without spans by {even:.0e}; film 2's spans move film 1 by {moved[0]:.2f}, in its first",
          f"step {len(unit)} unit(s), from unit {unit[0] + 1} on; 31 films: {error}")
if not (all(off > 0.15 and even < 1e-5 and moved > 0.005 and error for off, even, moved, _, error in found.values())
        and found["CfC"][3] == [1]):
    raise SystemExit("changed: each film has its own time spans")
PYTHON

"""README.md of a trained narrator: how it was made, in the form of the hub's model cards, so that the
folder can be uploaded as it is.
"""
from pathlib import Path

from narrator import Config
from support.common.disk import read_jsonl, write_text
from support.common.options import DATASETS
from support.common.progress import say
from support.common.text import counted
from support.common.version import versions

# options that say where something lay
PRIVATE = {"output", "root", "resume", "device"}
TEXT = """---
{header}
---
# {name}

It narrates videos as they play, in bounded memory: FlowNar
([paper](https://arxiv.org/abs/2606.00620)), trained with a reference implementation of it.

```bash
python stream.py video.mp4 --model OWNER/{name}         # as it is named on the hub, or this folder
```

{facts}
"""


def write_card(config: Config, videos: int, options) -> None:
    """Write README.md into the folder of a narrator that has been trained and saved, unless there is
    one.

    videos      how many it was trained on, or samples of a data set
    options     of the training (beyond/commands/train_command.py: Options)
    """
    from huggingface_hub import ModelCardData
    output = Path(options.output)
    card = output / "README.md"
    if card.exists():
        say(f"{card} is there, and stays as it is")
        return
    models = [known_as(config.llm), known_as(config.vision)]
    log = read_jsonl(output / "narrator-log.jsonl")
    values = vars(options) | options.narrator
    # of a data set's video, each annotator's narrations are a sample
    unit = "sample" if options.data in DATASETS else "video"
    given = [f"{name}: {known_as(str(values[name]))}"
             for name in sorted(options.given.keys() - PRIVATE)]
    facts = {
        "Language model": f"{models[0]}, mark {config.llm_mark}",
        "Vision encoder": f"{models[1]}, mark {config.vision_mark}",
        "Trained on": f"{known_as(options.data)}, {counted(videos, unit)}",
        "Options that were given": ", ".join(given) or "none",
        "Seed": options.seed,
        "Steps": log[-1]["step"] + 1,
        "Last figures": ", ".join(f"{name} {value:.4g}" for name, value in log[-1].items()),
        "Versions": ", ".join(f"{name} {version}" for name, version in versions().items()),
    }
    header = ModelCardData(
        base_model=[model.partition("@")[0] for model in models if "/" in model] or None,
        pipeline_tag="video-text-to-text",
        tags=["flownar", "video-captioning"],
    )
    write_text(card, TEXT.format(
        header=header.to_yaml(),
        name=output.resolve().name,
        facts="\n".join(f"* {name}: {fact}" for name, fact in facts.items()),
    ))


def known_as(source: str) -> str:
    """A model, or another value of an option, as others know it: a hub id with its revision; of a
    path its last name alone.
    """
    from huggingface_hub import try_to_load_from_cache
    if Path(source).is_absolute():
        return Path(source).name
    if source.count("/") != 1 or "@" in source:
        return source
    file = try_to_load_from_cache(source, "config.json")
    return f"{source}@{Path(file).parent.name}" if file else source

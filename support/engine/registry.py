"""Which settings a narrator can have, and which class it then is. narrator.py and beyond/baselines/
fill the table when they are imported.
"""
from support.common.errors import BadData
from support.common.options import names_of

# The classes of narrators, by the classes of their settings; the paper's is the first.
NARRATORS: dict[type, type] = {}


def make_config(**given):
    """Settings by name (narrator.py: Config). BadData if one is unknown or wrong."""
    for config_class in NARRATORS:
        if given.keys() <= names_of(config_class):
            return config_class(**given)
    paper, *_ = NARRATORS
    unknown = sorted(given.keys() - names_of(paper))
    raise BadData(f"no narrator has the settings {', '.join(unknown)} together (those of baselines "
                  f"are known after `import beyond.baselines`)")


def new_narrator(llm, tokenizer, config):
    """A narrator with random weights on a language model."""
    return NARRATORS[type(config)](llm, tokenizer, config)

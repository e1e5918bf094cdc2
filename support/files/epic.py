"""EPIC-Kitchens' narrations as sentences, by rule: "open fridge" -> "You open the fridge."

The paper's sentences were written by a language model (FlowNar-Data has them). This rule is for the
owners' files. It holds where a narration begins with its verb; `data.py stats` lists the others.

verb    EPIC's own column, such as "put-down"; its first word is the base of the verb
"""

ARTICLES = {"the", "a", "an", "my", "your", "his", "her", "its", "their", "some", "another", "both",
            "all", "more", "less", "one", "two", "three", "four", "it", "them", "this", "that",
            "these", "those", "something", "everything", "each", "every"}
PREPOSITIONS = {"in", "into", "on", "onto", "from", "with", "to", "of", "off", "out", "over",
                "under", "around", "at", "inside", "through", "for", "behind", "between", "near",
                "against", "towards", "by", "and", "using"}
PARTICLES = {"down", "up", "off", "on", "out", "in", "away", "back", "over", "around", "together",
             "apart", "open"}
# After "and" these are verbs again, and not things: "hold and dry lid"
SECOND_VERBS = {"put", "take", "place", "pick", "open", "close", "cut", "wash", "rinse", "dry",
                "wipe", "stir", "mix", "pour", "add", "move", "turn", "throw", "hold", "peel"}
ADVERBS = {"still", "now", "then", "again"}
# How verbs begin that can stand before another one: "continue stirring", "starting to cut"
BEFORE_A_VERB = ("continu", "start", "begin", "keep", "finish", "stop")

UNLIKE = "narrations that do not begin with their verb, as sentences perhaps wrong"


def sentence(narration: str, verb: str = "") -> str:
    """A narration as a sentence; "" if it has no words.

    put down knife on board.    You put down the knife on the board.
    still stirring pasta        You are still stirring the pasta.
    """
    adverb, words = words_of(narration)
    if not words:
        return ""
    base, *rest_of_verb = verb.lower().split("-")
    end = verb_at(words, base) + 1
    if rest_of_verb and words[end:end + len(rest_of_verb)] == rest_of_verb:
        end += len(rest_of_verb)
    elif len(words) > end + 1 and words[end] in PARTICLES:
        end += 1
    written = ["You", *adverb, *words[:end]]
    if is_ing(words[0]) and words[0] != base:
        written.insert(1, "are")

    noun_may_begin = True                      # after the verb, and after each preposition
    word_before = ""
    for word in words[end:]:
        is_verb = word_before == "and" and (word in SECOND_VERBS or is_ing(word))
        is_small = word in ARTICLES | PREPOSITIONS | PARTICLES or word.isdigit()
        if noun_may_begin and not is_verb and not is_small:
            written.append("the")
        written.append(word)
        noun_may_begin = is_verb or word in PREPOSITIONS
        word_before = word
    return " ".join(written) + "."


def has_verb(narration: str, verb: str) -> bool:
    """Whether a narration says its verb, or its form in -ing, where `sentence` looks for it."""
    _, words = words_of(narration)
    base, *_ = verb.lower().split("-")
    if not words:
        return True
    said = words[verb_at(words, base)]
    return said == base or is_ing(said) and said.startswith(base.removesuffix("e"))


def words_of(narration: str) -> tuple[list[str], list[str]]:
    """An adverb before the verb, if there is one, and the other words: in lower case, without
    punctuation around them. A comma between two words becomes "and".
    """
    words = []
    for part in narration.lower().split(","):
        more = [word.strip("\"'.;:!?()") for word in part.split()]
        more = [word for word in more if word]
        if words and more and more[0] != "and":
            words.append("and")
        words += more
    if len(words) > 1 and words[0] in ADVERBS:
        return words[:1], words[1:]
    return [], words


def verb_at(words: list[str], base: str) -> int:
    """Where the verb stands: 0, or after "continue", "start to" and the like."""
    if words[0] != base and words[0].startswith(BEFORE_A_VERB):
        if is_ing("".join(words[1:2])):
            return 1
        if words[1:2] == ["to"] and len(words) > 2:
            return 2
    return 0


def is_ing(word: str) -> bool:
    return word.endswith("ing") and word not in ("bring", "wring")

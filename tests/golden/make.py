"""Makes the files beside it: what the published implementation computed with small models, without Llama's tokenizer.

    python -m tests.golden.make               (needs ../shared/golden, which is not part of the repository)

The values come from zeyun-zhong/FlowNar, run in fp32 on a CPU with three small models (Llama of width 64, 2 layers)
trained on synthetic videos: FlowNar (M = 20), FlowNar-C (M = 4, k = 2) and the baseline VideoLLM-online. This script
takes one video of them, and what the tests read:

    llm/                the language model, its vocabulary cut from 128,256 words to the 64 that occur in the prompt, in
                        narrations, or among the three likeliest next words; rows of the embedding (which is the output
                        head, too) are copied and numbered anew; its values are exactly bf16, and stored so
    llm/tokenizer.json  those words and nothing else: the longest word that fits is split off, again and again
    video.safetensors   frame features x [T, J, D] of the video
    MODEL/              a published checkpoint folder (PEFT); the rows of lm_head's LoRA B are cut likewise. Beside it:
      streaming.json            narrations, probabilities, thresholds, positions and cache lengths, with one threshold
                                and with two; the three likeliest words after every call of the language model
      teacher_forced.json       tokens, labels, loss and metrics of the teacher-forced protocol
      published.safetensors     CLAM's states and memory tokens after each of 80 frame tokens, the connector's output,
                                the training mask (rows packed to bits), the largest logit of every teacher-forced row
    data/               tiny trees of EPIC-Kitchens and Ego4D, and the samples of the published loaders
    scores/             the published evaluator's inputs and values

No logit of the words that stay changes by a bit. Those that are left out held up to 0.5 % of the probability, so
p([SKIP]) is up to 0.0001, the loss 0.0006 and a perplexity 0.002 off. Gradients would be off by up to 45 % (rows that
are 99.9 % sure learn from the rest alone), so there are none.
"""
import json
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import load_file, save_file

from support.common.disk import read_json, write_json, write_text
from support.common.errors import BadData, command_line

HERE = Path(__file__).parent
GOLDEN = HERE.parent.parent.parent / "shared" / "golden"
MODELS = ("flownar", "flownar_c", "videollm")
VIDEO = "video_101"
OLD = 128256                                   # words of the full vocabulary; then follow memory and frame tokens
HEAD = "base_model.model.lm_head.lora_B.weight"


def write_lines(path: Path, content: dict) -> None:
    """JSON with one line per key of the top level, so that differences can be read."""
    rows = (f"{json.dumps(key)}: {json.dumps(value, separators=(',', ':'))}" for key, value in content.items())
    write_text(path, "{\n" + ",\n".join(rows) + "\n}\n")


# ---------------------------------------------------------------------- vocabulary

def recorded(model: str) -> tuple[dict, dict]:
    """{setting: record} of the streamed video, {case: record} of the teacher-forced one."""
    streamed = read_json(GOLDEN / model / "streaming.json")[VIDEO]
    return streamed, read_json(GOLDEN / model / "teacher_forced.json")


def occurring(tokenizer) -> dict[int, int]:
    """The full vocabulary's id -> the cut one's; begin and end of text first, the rest in order of occurrence."""
    ids = [tokenizer.bos_token_id, tokenizer.eos_token_id]
    for model in MODELS:
        streamed, teacher = recorded(model)
        for record in streamed.values():
            ids += record["prompt_ids"] + sum(record["output_ids"], [])
        for record in teacher.values():
            ids += record["input_ids"]
    for model in MODELS:
        for record in recorded(model)[0].values():
            ids += sum((call["top_ids"] for call in record["calls"]), [])
    new = {old: n for n, old in enumerate(dict.fromkeys(i for i in ids if i < OLD))}
    return new | {OLD: len(new), OLD + 1: len(new) + 1, -100: -100}


def kept(new: dict[int, int]) -> list[int]:
    """The words' old ids, in their new order."""
    return [old for old in new if 0 <= old < OLD]


def write_tokenizer(tokenizer, new: dict[int, int]) -> None:
    """Words are split off from the left, the longest that fits first; that gives the recorded ids for all our texts."""
    from tokenizers import AddedToken, Tokenizer, decoders, models
    words = {tokenizer.decode([old]): new[old] for old in kept(new)}
    cut = Tokenizer(models.WordPiece(words, unk_token="", max_input_chars_per_word=1000, continuing_subword_prefix=""))
    cut.decoder = decoders.Fuse()
    begin, end = list(words)[:2]
    cut.add_special_tokens([AddedToken(word, special=True) for word in (begin, end)])
    cut.save(str(HERE / "llm" / "tokenizer.json"))
    write_json(HERE / "llm" / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast", "bos_token": begin, "eos_token": end,
        "clean_up_tokenization_spaces": False})


def write_llm(new: dict[int, int]) -> None:
    weights = load_file(GOLDEN / "base_llm" / "model.safetensors")
    weights["model.embed_tokens.weight"] = weights["model.embed_tokens.weight"][kept(new)]
    save_file(weights, HERE / "llm" / "model.safetensors", metadata={"format": "pt"})
    config = read_json(GOLDEN / "base_llm" / "config.json")
    config |= {"vocab_size": len(kept(new)), "bos_token_id": 0, "eos_token_id": 1, "torch_dtype": "bfloat16"}
    write_json(HERE / "llm" / "config.json", config)


# ---------------------------------------------------------------------- models

def write_model(model: str, new: dict[int, int]) -> None:
    source, target = GOLDEN / model, HERE / model
    config = read_json(source / "checkpoint" / "adapter_config.json")
    write_json(target / "adapter_config.json", config | {"base_model_name_or_path": "../llm"})
    weights = load_file(source / "checkpoint" / "adapter_model.safetensors")
    weights[HEAD] = weights[HEAD][kept(new)]
    save_file(weights, target / "adapter_model.safetensors", metadata={"format": "pt"})
    streamed, teacher = recorded(model)
    renumber = lambda ids: [new[i] for i in ids]
    runs = {setting: streaming(record, renumber) for setting, record in streamed.items()}
    write_lines(target / "streaming.json", runs)
    for case in teacher.values():
        case.update(input_ids=renumber(case["input_ids"]), labels=renumber(case["labels"]))
    write_lines(target / "teacher_forced.json", teacher)
    save_file(tensors(source, renumber), target / "published.safetensors")


def streaming(record: dict, renumber) -> dict:
    """What the tests read of one run: per narration, per decided frame, per call of the language model."""
    frames, after, calls = record["frames"], record["after_narration"], record["calls"]
    return {"prompt_ids": renumber(record["prompt_ids"]), "narration_frames": record["narration_frames"],
            "output_ids": [renumber(ids) for ids in record["output_ids"]], "texts": record["texts"],
            "cache_len": [row["cache_len_after_trim"] for row in after], "last_pos": [row["last_pos"] for row in after],
            "frames": [row["frame"] for row in frames], "skip_prob": [row["skip_prob"] for row in frames],
            "threshold": [row["threshold"] for row in frames],
            "top_ids": [renumber(call["top_ids"]) for call in calls], "top_logp": [call["top_logp"] for call in calls]}


def tensors(source: Path, renumber) -> dict[str, torch.Tensor]:
    rows = load_file(source / "teacher_forced_logits.safetensors")
    found = {}
    for name in ("true", "shifted"):
        found[f"{name}.max_logit"] = rows[f"{VIDEO}.{name}.max_logit_all_positions"]
        found[f"{name}.argmax"] = torch.tensor(renumber(rows[f"{VIDEO}.{name}.argmax"].tolist()), dtype=torch.uint8)
    if (source / "clam.safetensors").exists():
        clam = load_file(source / "clam.safetensors")
        found |= {"memory": clam["memory_all_positions"], "state": clam["state_all_positions"],
                 "connector": clam["connector_of_input"]}
        mask = load_file(source / "attention_mask.safetensors")["visible"]
        found["mask"] = torch.from_numpy(np.packbits(mask.numpy(), axis=1))
    return found


# ---------------------------------------------------------------------- data layouts, scores

def write_data() -> None:
    source, target = GOLDEN / "data_layout", HERE / "data"
    for name, files in {"ek100": ["refined_val_narrations.json"],
                        "ego4d": ["refined_narration_stream_val.json", "segment_summaries.json"]}.items():
        for file in ["features.safetensors", "features_metadata.json", *(f"annotations/{file}" for file in files)]:
            (target / name / file).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source / name / file, target / name / file)
    expected = read_json(source / "expected.json")
    content = {kind: [sample(case) for case in cases]
               for kind, cases in expected["flownar"].items() if isinstance(cases, list)}
    content |= {"clean": expected["ego4d_clean_text"], "ceil": expected["ceil_time_by_fps"]}
    write_lines(target / "expected.json", content)


def sample(case: dict) -> dict:
    """Name, narrations (frame, text), shape and sum of the features of one sample."""
    frame, narrations = -1, []
    for message in case.get("conversation", []):
        frame += message.get("num_frames", 0)
        if message["role"] == "assistant":
            narrations.append((frame, message["content"]))
    return {"name": case.get("sample_name"), "narrations": narrations,
            "shape": case["frames_shape"], "sum": case["frames_sum"]}


def write_scores() -> None:
    case = read_json(GOLDEN / "eval" / "ek100.json")
    names = ("gts", "predictions", "corpus_metrics", "per_video_metrics")
    write_lines(HERE / "scores" / "ek100.json", {name: case[name] for name in names})
    for name in ("matching_small", "scorers_pairs"):
        write_lines(HERE / "scores" / f"{name}.json", read_json(GOLDEN / "eval" / f"{name}.json"))


def main() -> None:
    from support.engine.checkpoint import load_tokenizer
    if not GOLDEN.is_dir():
        raise BadData(f"{GOLDEN}: not there; it is needed only to make the files in {HERE} again")
    for folder in ("llm", *MODELS, "data", "scores"):
        (HERE / folder).mkdir(exist_ok=True)
    tokenizer = load_tokenizer(str(GOLDEN / "base_llm"))
    new = occurring(tokenizer)
    write_tokenizer(tokenizer, new)
    write_llm(new)
    for model in MODELS:
        write_model(model, new)
    save_file({VIDEO: load_file(GOLDEN / MODELS[0] / "features.safetensors")[VIDEO]}, HERE / "video.safetensors")
    write_data()
    write_scores()
    size = sum(file.stat().st_size for file in HERE.rglob("*") if file.is_file())
    print(f"{len(kept(new))} words, {size / 2 ** 20:.2f} MB")


if __name__ == "__main__":
    command_line(main)

"""The training mask as text and as a picture (Fig. 4), over tokens with short names."""
import torch
from torch import Tensor

from support.common import pyplot, save_figure


class Letters:
    """A tokenizer for drawing: every text that it meets is one token, with a `short` name for some."""
    bos_token_id, eos_token_id = None, 1

    def __init__(self, short: dict[str, str]):
        self.short, self.texts = short, []

    def __call__(self, text: str, add_special_tokens: bool = False) -> dict:
        if text not in self.texts:
            self.texts.append(text)
        return {"input_ids": [self.texts.index(text) + 2]}

    def decode(self, ids: list[int]) -> str:
        return "".join(self.short.get(self.texts[i - 2], self.texts[i - 2]) for i in ids)

    def get_vocab(self) -> list[str]:
        return self.texts


def print_matrix(mask: Tensor, labels: list[str], segments: list[int]) -> None:
    """mask [L, L], one line a row, with the label and the segment of each token."""
    print("segment     " + " ".join(f"{label:>2}" for label in labels))
    for row, label, segment in zip(mask, labels, segments):
        print(f"{segment:>7}  {label:>2} " + " ".join(" ■" if seen else " ·" for seen in row.tolist()))


def plot_matrix(mask: Tensor, labels: list[str], kinds: list[int], png: str) -> None:
    """mask [L, L], coloured by the kinds of the keys: 0 prompt, 1 visual, 2 narration."""
    plt = pyplot()
    image = torch.where(mask, torch.tensor(kinds).add(1).expand_as(mask), 0)
    figure, axes = plt.subplots(figsize=(8, 8))
    colours = plt.matplotlib.colors.ListedColormap(["white", "#b0b0b0", "#4c9be8", "#e8a04c"])
    axes.imshow(image.numpy(), cmap=colours, vmin=0, vmax=3)
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_yticks(range(len(labels)), labels, fontsize=7)
    axes.set(title="Training mask: prompt grey, visual blue, narrations orange", xlabel="keys", ylabel="queries")
    save_figure(figure, png)

"""Make what the programs of `plans.toml` ask the hub for: made_for_plans.py KIND[:ARGUMENT] …

`made.py` makes the rest: words that are no kind here are its kinds. Weights are random and rows are made, under the
names that the programs have.
"""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import made

SENTENCE = "The quality of mercy is not strained. " * 12
METRIC = '''"""A metric in the place of one that is fetched: training ends before it is asked."""
import datasets
import evaluate


class Metric(evaluate.Metric):
    def _info(self):
        features = datasets.Features({"predictions": datasets.Value("int64"), "references": datasets.Value("int64")})
        return evaluate.MetricInfo(description="", citation="", features=features)

    def _compute(self, predictions, references):
        return {"accuracy": 0.0}
'''


def copy(folder: str, name: str) -> None:
    """Copy a folder that was made to another name."""
    shutil.copytree(folder, name)


def alpaca() -> None:
    """Move the rows of made/alpaca.json to a data set, in made/alpaca."""
    made.instructions()
    Path("made/alpaca").mkdir()
    shutil.move("made/alpaca.json", "made/alpaca/train.json")


def rows(name: str, configuration: str, count: str, *columns: str) -> None:
    """Write rows of a sentence for each column, under a name of the hub and of a configuration; `label` is 0 or 1."""
    folder = Path(name)
    folder.mkdir(parents=True)
    card = f"---\nconfigs:\n  - config_name: {configuration}\n    data_files:\n"
    content = [row(columns, number) for number in range(int(count))]
    for part in ("train", "validation", "test"):
        made.write_rows(folder / f"{part}.jsonl", content)
        card += f"      - {{split: {part}, path: {part}.jsonl}}\n"
    (folder / "README.md").write_text(f"{card}---\n", encoding="utf-8")


def row(columns: Iterable[str], number: int) -> dict[str, object]:
    content: dict[str, object] = {}
    for column in columns:
        content[column] = number % 2 if column in ("label", "idx") else SENTENCE
    return content


def bert(name: str) -> None:
    """Save BERT's shape."""
    from transformers import BertConfig, BertModel

    made.save_with_tokenizer(BertModel(BertConfig()), name)


def vit(name: str) -> None:
    """Save ViT-Base's shape with its image processor."""
    from transformers import ViTConfig, ViTImageProcessor, ViTModel

    ViTModel(ViTConfig()).save_pretrained(name)
    ViTImageProcessor().save_pretrained(name)


def photographs(name: str) -> None:
    """Write 256 pictures of noise of ten kinds as a data set, with the columns of timm/eurosat-rgb."""
    from datasets import ClassLabel, Dataset, Features, Image

    picture = made.noise(64, 64)
    labels = [number % 10 for number in range(256)]
    features = Features({"image": Image(), "label": ClassLabel(num_classes=10)})
    columns = {"image": [picture] * len(labels), "label": labels}
    Path(name).mkdir(parents=True)
    for part in ("train", "test"):
        data_set = Dataset.from_dict(columns, features=features)
        data_set.to_parquet(Path(name, f"{part}.parquet"))


def chats() -> None:
    """Write 64 conversations of two turns in made/chats.json, as FastChat reads them."""
    question = {"from": "human", "value": SENTENCE}
    answer = {"from": "gpt", "value": SENTENCE * 3}
    conversation = {"conversations": [question, answer] * 2}
    made.write_json(Path("made/chats.json"), [conversation] * 64)


def metric(name: str) -> None:
    """Write a metric where `evaluate.load` looks for one."""
    Path(name).mkdir()
    Path(name, f"{name}.py").write_text(METRIC, encoding="utf-8")


if __name__ == "__main__":
    made.make(sys.argv[1:], vars(made) | globals())

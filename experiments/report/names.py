"""Names in figures, tables and verdicts. What is not listed here still gets a readable name."""

from __future__ import annotations

from zlib import crc32

from cdgrab.sorters import label

BASELINE, OURS, UNCOORDINATED = "d_rr", "cd_grab", "id_grab_pair"
LOSS, BOUND = "train_loss", "herding_per_step"

ALONE = "grab_pair"  # one worker that holds all units, and may order them freely
ONE_WORKER = {ALONE: "GraB, one worker with all", "grab": "GraB (Bal), one worker with all"}
OPTIONS = {
    "rule=walk": "random walk",
    "shared=true": "shared order",
    "sketch=countsketch": "",
    "initial=identity": "first as stored",
}
PUBLISHED_SORTERS = {label(name): name for name in (OURS, BASELINE, "id_grab_bal", UNCOORDINATED)}
PUBLISHED_SORTERS |= {"Balance": "grab", "PairBalance": "grab_pair", "RR": BASELINE}  # one worker: Figure 6
COLOURS = {
    "cd_grab": "#c4322b",
    "cd_grab,initial=identity": "#e79b97",
    "d_rr": "#3465a4",
    "d_rr,shared=true": "#86a9d1",
    "id_grab_pair": "#e69f00",
    "id_grab_bal": "#009e73",
    "grab": "#009e73",
    "grab_pair": "#e69f00",
    "riffle": "#7b5ea7",
    "riffle,initial=identity": "#bdaed6",
    "kh": "#56a0c9",
    "flip_flop": "#8c6d46",
    "shuffle_once": "#777777",
}
OTHER_COLOURS = ("#d66bb0", "#2f8f8b", "#a5a000", "#5b3a8e", "#b05a1e", "#4c8f2f", "#1f5f9e", "#8f1f4c")

TASKS = {  # and what the rows of their data are
    "lr_hmda": ("LR-HMDA", "applications"),
    "lstm_wiki2": ("LSTM-WikiText-2", "words"),
    "mlp_m4": ("MLP-M4", "windows"),
    "cifar10": ("CIFAR-10", "pictures"),
    "gpt2_wiki103": ("GPT2-WikiText-103", "tokens used"),
    "glue": ("GLUE", "examples"),
}
GLUE = ("MNLI", "QQP", "QNLI", "SST-2", "CoLA", "MRPC", "RTE")  # those of the paper's table, then the others

METRICS = {
    "train_loss": "full train loss",
    "test_accuracy": "test accuracy (%)",
    "test_ppl": "test perplexity",
    "test_ppl_authors": "test perplexity, as published",
    "val_ppl": "validation perplexity",
    "val_ppl_authors": "validation perplexity, as published",
    "val_accuracy": "validation accuracy (%)",
    "val_accuracy_mm": "mismatched validation accuracy (%)",
    "test_smape": "test SMAPE",
    "herding_replayed": "herding bound, replayed as published",
    "herding_per_vector": "herding bound, per vector",
    "herding_per_step": "herding bound, per step (eq. 8)",
    "elapsed": "training time (s)",
}
WORDS = {"val": "validation", "ppl": "perplexity", "lr": "learning rate", "mlp": "MLP"}
HIGHER_IS_BETTER = ("accuracy", "bleu", "rouge", "f1", "auc", "score")
COLUMN_TITLES = {"workers": "{:g} workers", "task.lr": "lr {:g}"}


def kind(sorter: str) -> str:
    """The sorter of a variant such as "cd_grab,rule=walk"."""
    return sorter.partition(",")[0]


def sorter_label(sorter: str, known_as: str = "") -> str:
    """A sorter with its options: "cd_grab,rule=walk" is "CD-GraB, random walk". known_as: its label without options."""
    name, *options = sorter.split(",")
    words = [OPTIONS.get(option.lower(), option.replace("sketch_size=", "sketch of ")) for option in options]
    return ", ".join([known_as or ONE_WORKER.get(name) or label(name) or readable(name), *filter(None, words)])


def sorter_colour(sorter: str) -> str:
    """A sorter without a colour of its own gets one of a few others, the same in every figure."""
    name = kind(sorter)
    known = COLOURS.get(sorter.lower()) or COLOURS.get(name)
    return known or OTHER_COLOURS[crc32(name.encode()) % len(OTHER_COLOURS)]


def sorter_style(sorter: str) -> dict:
    """Colour and dashes of a sorter's line; one worker that holds all units is grey and dotted."""
    if sorter in ONE_WORKER:
        return {"color": "0.25" if sorter == ALONE else "0.6", "ls": (0, (1, 1.2))}
    return {"color": sorter_colour(sorter), "ls": "-"}


def sorter_line(sorter: str) -> dict:
    """The same, with the label for legends."""
    return sorter_style(sorter) | {"label": sorter_label(sorter)}


def task_name(task: str) -> str:
    return TASKS[task][0] if task in TASKS else readable(task)


def counted(task: str | None) -> str:
    """What the rows of a task's data are."""
    return TASKS[task][1] if task in TASKS else "rows"


def metric_label(metric: str) -> str:
    """A metric that is not listed gets a readable label: val_bleu is "validation bleu"."""
    return METRICS.get(metric) or readable(metric)


def higher_is_better(metric: str) -> bool:
    return any(word in metric for word in HIGHER_IS_BETTER)


def column_title(setting: str, value: object) -> str:
    """64 workers; lr 0.001; MNLI."""
    return COLUMN_TITLES.get(setting, "{}").format(value)


def readable(name: str) -> str:
    return " ".join(WORDS.get(word, word) for word in name.split("_"))

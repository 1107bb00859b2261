"""Small repositories in the on-disk format of the hub, to be read by the real `datasets` library without a network.

A repository is a folder of parquet files in one folder per config, and a dataset card whose yaml part lists the files,
the features and the numbers of rows.
"""

import hashlib
import os
from pathlib import Path

import datasets
import huggingface_hub
import pytest
import yaml

REAL = Path(os.environ.get("CDGRAB_DATA") or "nowhere")


def needs(*names):
    there = all((REAL / name).is_file() for name in names)
    return pytest.mark.skipif(not there, reason=f"needs {', '.join(names)} in CDGRAB_DATA")


@pytest.fixture(autouse=True)
def offline(tmp_path, monkeypatch):
    """Whatever asks the hub for something fails at once; the library's cache is new for every test."""
    monkeypatch.setattr(huggingface_hub.constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path / "cache")
    datasets.disable_progress_bars()


def make_repository(folder, configs):
    """configs: name -> split -> Dataset. Every split is in two files, as the hub's larger ones are in several."""
    card = {"configs": [], "dataset_info": []}
    for config, splits in configs.items():
        (folder / config).mkdir(parents=True)
        for split, rows in splits.items():
            for shard in range(2):
                path = folder / config / f"{split}-{shard:05}-of-00002.parquet"
                rows.shard(2, shard, contiguous=True).to_parquet(path)
        files = [{"split": split, "path": f"{config}/{split}-*"} for split in splits]
        card["configs"].append({"config_name": config, "data_files": files})
        info = {"config_name": config, "features": next(iter(splits.values())).features._to_yaml_list()}
        counts = [
            {"name": split, "num_bytes": rows.data.nbytes, "num_examples": len(rows)} for split, rows in splits.items()
        ]
        card["dataset_info"].append(info | {"splits": counts})
    (folder / "README.md").write_text(f"---\n{yaml.safe_dump(card)}---\n# A dataset card\n")
    return str(folder)


def known(content):
    """name -> bytes to name -> (size, sha256)."""
    return {name: (len(data), hashlib.sha256(data).hexdigest()) for name, data in content.items()}

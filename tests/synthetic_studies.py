"""Made-up results of studies, for tests of what their verdicts say."""

import json
from functools import cache
from zlib import crc32

import numpy as np
import pandas as pd

from experiments.studies import heterogeneity, learning_rate, scaling, sorters
from experiments.studies.base import compose_study

TRAINING = {"heterogeneity": heterogeneity, "learning_rate": learning_rate, "scaling": scaling, "sorters": sorters}


@cache
def settings_of(name, size="paper"):
    study = compose_study([f"study={name}", f"size={size}", "data=embedded"])
    return study.at(study.looks[0]).settings


def answers(verdicts):
    return {verdict.claim: verdict.answer for verdict in verdicts}


def answers_of(name, table, settings):
    return answers(TRAINING[name].verdicts(table, settings))


def made_up(name, loss, size="paper", settings=None, **more):
    """All runs of a study that trains; `loss` and `more` are functions of a part's key."""
    settings, rows = settings or settings_of(name, size), []
    for part in TRAINING[name].parts(settings):
        if part.alone:
            continue
        noise = 1e-4 * np.random.default_rng(crc32(json.dumps(part.key).encode())).normal()
        value = loss(part.key) * (1 + 0.01 * part.key["seed"]) + noise  # seeds differ more than sorters
        epochs = settings.tasks[part.key["task"]].epochs
        others = {column: function(part.key) * (1 + 1e-3 * noise) for column, function in more.items()}
        rows.append(part.key | {"train_loss": value, "start_loss": 2.0, "epochs_done": epochs} | others)
    return pd.DataFrame(rows), settings

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
    keys = trained_in(name, settings) if settings else usually_trained_in(name, size)
    settings, rows = settings or settings_of(name, size), []
    epochs = {task: its.epochs for task, its in settings.tasks.items()}
    for key, normal in keys:
        noise = 1e-4 * normal
        value = loss(key) * (1 + 0.01 * key["seed"]) + noise  # seeds differ more than sorters
        others = {column: function(key) * (1 + 1e-3 * noise) for column, function in more.items()}
        rows.append(key | {"train_loss": value, "start_loss": 2.0, "epochs_done": epochs[key["task"]]} | others)
    return pd.DataFrame(rows), settings


def trained_in(name, settings):
    """The keys of all parts that train, and a normal number for each."""
    keys = [part.key for part in TRAINING[name].parts(settings) if not part.alone]
    return [(key, np.random.default_rng(crc32(json.dumps(key).encode())).normal()) for key in keys]


@cache
def usually_trained_in(name, size):
    return trained_in(name, settings_of(name, size))

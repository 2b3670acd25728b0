"""Every test runs on one thread and offline; the random model is written once per session."""

import os
from pathlib import Path

os.environ.setdefault("WANDB_MODE", "offline")

import pytest
import torch
from models import random_llama

torch.set_num_threads(1)


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory) -> Path:
    return random_llama(tmp_path_factory.mktemp("model"))

"""The page of the library: what stands there runs."""

import re
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

from vramfarm import folder

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "library.md").read_text() + (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"## (.+?)\n|```python\n(.*?)```", "## the loop\n" + PAGE, re.DOTALL)
STEPS = {"the loop": 6, "Epochs, with a validation between them": 12, "Gradient accumulation": 3}
STEPS |= {"Several models and optimizers": 3, "Your own loop": 5, "Several loaders, one after the other": 7}
STEPS |= {"Four lines in your script": 5}  # in place of its 10_000


@pytest.mark.parametrize("title", STEPS)
def test_a_block_of_the_page_trains_and_saves(title, tmp_path, monkeypatch):
    """
    As it stands, with what a script has before it; its last step is on the disk.
    """
    monkeypatch.chdir(tmp_path)
    at = next(number for number, (found, _) in enumerate(BLOCKS) if found == title)
    code = next(code for _, code in BLOCKS[at:] if code)
    data = torch.linspace(0, 1, 32).reshape(8, 4)
    model = torch.nn.Linear(4, 8)
    optimizer = torch.optim.AdamW(model.parameters())
    given = {
        "torch": torch,
        "data": data,
        "model": model,
        "optimizer": optimizer,
        "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 10),
        "loader": DataLoader(TensorDataset(data), batch_size=2),
        "train_step": _train_step,
    }
    exec("from vramfarm import Checkpointer\n" + code.replace("10_000", "5"), given)

    assert STEPS[title] == folder.committed(tmp_path / "checkpoints")[0].manifest.step


def _train_step(model, batch):
    loss = model(batch[0]).square().mean()
    loss.backward()
    return loss

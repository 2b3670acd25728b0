import pytest

from grpo_cli.config import TrackerName, TrackerSection, WandbMode
from grpo_cli.tracking import Tracker


@pytest.fixture(autouse=True)
def nobody_is_logged_in(monkeypatch, tmp_path):
    for name in ("WANDB_API_KEY", "WANDB_MODE", "WANDB_BASE_URL", "NETRC"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))


@pytest.fixture
def track(tmp_path):
    """Make a Tracker in tmp_path/<name>; every one is finished at the end."""
    made = []

    def make(name="run", *, wandb="offline", resume_step=None, wandb_id=None, group=None, total_steps=4, log_every=2):
        run_dir = tmp_path / name
        run_dir.mkdir(exist_ok=True)
        section = TrackerSection(TrackerName.wandb if wandb else TrackerName.none, WandbMode[wandb or "auto"], "p", None, None, None, ["t"])
        made.append(
            Tracker(
                run_dir,
                section,
                config={"kl": {"beta": 0.04, "schedule": WandbMode.auto}, "name": name},
                total_steps=total_steps,
                log_every=log_every,
                resume_step=resume_step,
                wandb_id=wandb_id,
                group=group,
                run_name=name,
            )
        )
        return made[-1]

    yield make
    for tracker in made:
        tracker.finish("finished", "", [])

"""DistributedTuner: a search over hyperparameters, its trials in parallel."""

from __future__ import annotations

import json
import logging
import os
import re
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from distributed.communication.environment import detect
from distributed.config import Layer, load_layers, read_file
from distributed.config.load import as_layers
from distributed.errors import UserError
from distributed.interfaces.search import Search, SearchEngine, TrialEnd
from distributed.operations.tuning.parent_run import ParentRun
from distributed.operations.tuning.search_folder import SearchFolder, new_folder
from distributed.operations.tuning.search_space import parse_space
from distributed.operations.tuning.trial import TrialOrder
from distributed.operations.tuning.trial_record import Trial, best_of, is_number, load_trial, ranked
from distributed.registry.catalog import get_catalog, load_target, require

__all__ = ["DistributedTuner"]

logger = logging.getLogger("distributed")
_FIXED = (str, int, float, bool, type(None))


class DistributedTuner:
    """Search for the best hyperparameters, by Ray Tune.

    Args:
        train_fn: called with a sample in each trial. Whatever trainers it builds, each of their epochs
            counts; a dictionary that it returns is the trial's last report.
        search_space: name -> Ray Tune's objects (``tune.choice([64, 128])``), plain words
            (``{"loguniform": [1e-4, 1e-2]}``, see `distributed.operations.tuning.search_space.KINDS`), or
            fixed values.
        num_gpus: GPUs for all trials together; without a GPU, as many CPU slots. None: all available.
        num_cpus: number of CPU slots (alternative to num_gpus).
        trials_per_gpu: number of trials that share a GPU (or slot).
        ranks_per_trial: ranks that a trial's trainer may start, each with a GPU (or slot), on one node.
        max_concurrent: maximum number of concurrent trials.
        metric: metric to optimize, with or without ``val_``. None: val_accuracy where it is
            reported, else val_loss, accuracy, loss, train_loss.
        mode: ``max``, ``min``, or ``auto``: less is better where the name has 'loss' or 'error' in it.
        scheduler: None runs every trial to its end; ``asha`` stops poor trials early; ``pbt`` continues
            poor trials from good ones' checkpoints with changed parameters; or an object of Ray's.
        scheduler_options: arguments of Ray's class behind ``asha`` or ``pbt``.
        grace_period: epochs before ``asha`` stops a trial; epochs between changes of ``pbt``.
        max_epochs: maximum epochs per trial, whatever its trainer's configuration.
        checkpoints: whether each trial saves after every epoch, in its own folder.
        config: configuration overrides for every trainer: a mapping or the path of a YAML file.
        output_dir: folder of the search; None is ``tuned/`` and the time. Nodes of a cluster share it.
        name: name of the search in the trackers; None is the folder's.
        seed: seed of the samples.
        resume: resume the search in `output_dir`, if there is one: with this call's time limit, slots and
            concurrency, and otherwise with its first arguments.
        time_limit: seconds after which all trials end. A resumed search continues interrupted trials;
            under a scheduler, which stops trials too, it continues none that had begun.
        mlflow: record the search in MLflow, each trial a child of its run; a text names the experiment.
        tensorboard: a folder of events for each trial, in ``output_dir/tensorboard``.
        address: address of a Ray cluster, as `ray.address`.

    Attributes:
        results: trials of the last `tune`, best first.
        output_dir: folder of the search.
        unread: sampled parameters that no trial of the last `tune` read; they are no part of its result.

    Raises:
        UserError: an invalid argument.
    """

    def __init__(
        self,
        train_fn: Callable[[dict[str, Any]], Any],
        search_space: Mapping[str, Any],
        *,
        num_gpus: int | None = None,
        num_cpus: int | None = None,
        trials_per_gpu: int = 1,
        ranks_per_trial: int = 1,
        max_concurrent: int | None = None,
        metric: str | None = None,
        mode: str = "auto",
        scheduler: Any = None,
        scheduler_options: Mapping[str, Any] | None = None,
        grace_period: int = 1,
        max_epochs: int | None = None,
        checkpoints: bool = True,
        config: Mapping[str, Any] | str | os.PathLike[str] | None = None,
        output_dir: str | os.PathLike[str] | None = None,
        name: str | None = None,
        seed: int = 0,
        resume: bool = False,
        time_limit: float | None = None,
        mlflow: bool | str = False,
        tensorboard: bool = False,
        address: str | None = None,
    ) -> None:
        if not callable(train_fn):
            raise UserError("not a function", field="train_fn", got=type(train_fn).__name__)
        self.train_fn, self.search_space = train_fn, parse_space(search_space)
        self.num_gpus, self.num_cpus, self.trials_per_gpu = num_gpus, num_cpus, trials_per_gpu
        self.ranks_per_trial, self.max_concurrent = ranks_per_trial, max_concurrent
        self.grace_period, self.max_epochs, self.checkpoints = grace_period, max_epochs, checkpoints
        self._check_counts()
        if mode not in ("auto", "max", "min"):
            raise UserError("unknown mode", field="mode", got=mode, allowed="auto, max, min")
        if time_limit is not None and not (is_number(time_limit) and time_limit > 0):
            raise UserError("must be positive", field="time_limit", got=time_limit, allowed="seconds above 0")
        if isinstance(seed, bool) or not isinstance(seed, int) or seed < 0:
            raise UserError("must be a non-negative integer", field="seed", got=seed, allowed="0, 1, 2, ...")
        if resume and output_dir is None:
            raise UserError(
                "there is no search to resume",
                field="resume",
                got=True,
                remedy="Set output_dir to its folder",
            )
        self.metric, self.mode, self.scheduler = metric, mode, scheduler
        self.scheduler_options = dict(scheduler_options or {})
        self.output_dir = (Path(output_dir) if output_dir else new_folder(Path("tuned"))).absolute()
        self.name, self.seed, self.resume = name or self.output_dir.name, seed, resume
        self.time_limit, self.address = time_limit, address
        self.mlflow, self.tensorboard = mlflow, tensorboard
        self._layers = self._configure(config)
        self._given = self._layers[:1] if config is not None else []
        self.results: list[Trial] = []
        self.unread: list[str] = []
        self._best: Trial | None = None

    @property
    def best(self) -> Trial:
        """The best trial of the last `tune`.

        Raises:
            UserError: there was none.
        """
        if self._best is None:
            raise UserError("nothing has been tuned yet", field="best", remedy="Call tune() first")
        return self._best

    @property
    def best_parameters(self) -> dict[str, Any]:
        """Parameters of the best trial, without those in `unread`.

        Raises:
            UserError: there was no trial.
        """
        return {name: value for name, value in self.best.parameters.items() if name not in self.unread}

    def tune(self, num_samples: int = 10) -> dict[str, Any]:
        """Run the search and return the parameters of the best trial.

        Args:
            num_samples: number of samples of the space; every point of a grid is a trial of its own.

        Raises:
            UserError: impossible resources; a metric that no trial reported; only user errors.
            WorkerError: every trial failed in another way.
        """
        _check_count("num_samples", num_samples)
        if detect(os.environ) is not None:
            raise UserError(
                "a search starts its trials itself, but a launcher has started this process as a rank",
                field="tune",
                remedy="Start the script with python, not with torchrun, srun or mpirun",
            )
        engine = self._engine()
        search = self._search(num_samples)
        hands_over = engine.hands_over(search)
        if hands_over and not self.checkpoints:
            raise UserError(
                "this scheduler continues trials from checkpoints",
                field="checkpoints",
                got=False,
                allowed="True",
            )
        load_layers(self._layers)
        folder = SearchFolder(self.output_dir)
        before = folder.claim(self._asked(engine, num_samples), self.resume)
        if before.get("complete"):
            return self._conclude(folder.read_results())
        params = {"num_samples": num_samples, "scheduler": str(self.scheduler), "seed": self.seed}
        with ParentRun(self._layers, self.name, before.get("trackers", {}), params) as parent:
            folder.note(trackers=parent.contexts)
            folder.write_order(self._order(hands_over, parent.contexts))
            ends = engine.run(search)
            trials = [self._trial(end) for end in ends]
            folder.write_results(trials, self._is_complete(trials, engine.num_trials(search)))
            best = self._conclude(trials)
            parent.conclude(self.best, [folder.results])
        return best

    def plot(self, path: str | os.PathLike[str]) -> str:
        """Plot the search as one HTML file: its course, and every trial's parameters.

        Returns:
            The path.

        Raises:
            UserError: nothing has been tuned, or plotly is not installed.
        """
        from distributed.operations.tuning.plot import write_plot

        return write_plot(self.results, self.mode, self.best, path, title=self.name)

    # -- arguments -------------------------------------------------------------------

    def _check_counts(self) -> None:
        for field in ("num_gpus", "num_cpus", "max_concurrent", "max_epochs"):
            if getattr(self, field) is not None:
                _check_count(field, getattr(self, field))
        for field in ("trials_per_gpu", "ranks_per_trial", "grace_period"):
            _check_count(field, getattr(self, field))
        if self.num_gpus is not None and self.num_cpus is not None:
            raise UserError(
                "num_gpus and num_cpus both set the number of slots",
                field="num_cpus",
                remedy="Set only one of them",
            )
        if self.trials_per_gpu > 1 and self.ranks_per_trial > 1:
            raise UserError(
                "a trial of several ranks needs whole GPUs; trials_per_gpu shares one",
                field="trials_per_gpu",
                got=self.trials_per_gpu,
                allowed="1 with ranks_per_trial above 1",
            )

    def _configure(self, config: Any) -> list[Layer]:
        layers = []
        if isinstance(config, Mapping):
            layers.append(Layer("config", config))
        elif config is not None:
            layers.append(read_file(config))
        if self.mlflow:
            named = {"tracking.mlflow_experiment": self.mlflow} if isinstance(self.mlflow, str) else {}
            layers.append(Layer("DistributedTuner", {"mlflow_tracking": True, **named}))
        if self.tensorboard:
            layers.append(
                Layer("DistributedTuner", {"tensorboard_dir": str(self.output_dir / "tensorboard")})
            )
        return layers

    def _engine(self) -> SearchEngine:
        spec = next((s for s in get_catalog().backends.values() if s.search), None)
        if spec is None or spec.search is None:
            raise UserError(
                "no backend that runs searches is installed", remedy="pip install 'distributed-trainer[ray]'"
            )
        require(spec.requires, "DistributedTuner", spec.install_hint)
        engine: SearchEngine = load_target(spec.search)()
        return engine

    def _asked(self, engine: SearchEngine, num_samples: int) -> dict[str, Any]:
        scheduler = (
            self.scheduler if isinstance(self.scheduler, str | None) else type(self.scheduler).__name__
        )
        options = engine.describe(self.scheduler_options)
        asked = {
            "search_space": engine.describe(self.search_space),
            "num_samples": num_samples,
            "seed": self.seed,
            "metric": self.metric,
            "mode": self.mode,
            "scheduler": scheduler,
            # The memory address in an object's repr differs the next time.
            "scheduler_options": {n: re.sub(" at 0x[0-9a-f]+", "", text) for n, text in options.items()},
            "grace_period": self.grace_period,
            "max_epochs": self.max_epochs,
            "config": {
                name: value
                for layer in as_layers(load_layers(self._given))
                for name, value in layer.values.items()
                if not name.startswith("tracking.")
            },
            "ranks_per_trial": self.ranks_per_trial,
            "trials_per_gpu": self.trials_per_gpu,
        }
        found: dict[str, Any] = json.loads(json.dumps(asked, default=str))
        return found

    def _search(self, num_samples: int) -> Search:
        return Search(
            folder=str(self.output_dir),
            space=self.search_space,
            num_samples=num_samples,
            num_gpus=self.num_gpus,
            num_cpus=self.num_cpus,
            trials_per_gpu=self.trials_per_gpu,
            ranks_per_trial=self.ranks_per_trial,
            max_concurrent=self.max_concurrent,
            scheduler=self.scheduler,
            scheduler_options=self.scheduler_options,
            grace_period=self.grace_period,
            seed=self.seed,
            time_limit=self.time_limit,
            address=self.address,
            resume=self.resume,
        )

    def _order(self, hands_over: int, contexts: Mapping[str, dict[str, Any]]) -> TrialOrder:
        return TrialOrder(
            train_fn=self.train_fn,
            folder=str(self.output_dir),
            ranks=self.ranks_per_trial,
            metric=self.metric,
            mode=self.mode,
            checkpoints=self.checkpoints,
            hands_over=hands_over,
            max_epochs=self.max_epochs,
            layers=tuple(self._layers),
            tracker_contexts=contexts,
        )

    # -- results -----------------------------------------------------------------------

    def _trial(self, end: TrialEnd) -> Trial:
        trial = load_trial(self.output_dir, end.name) or Trial(end.name, end.parameters)
        trial.parameters = end.parameters
        if end.failed and trial.status != "failed":
            lines = [line.strip() for line in (end.error or "").splitlines() if line.strip()]
            trial.status, trial.error = "failed", trial.error or (lines[-1] if lines else "it was killed")
        elif trial.status == "running":
            trial.status = "stopped"
        trial.judge(self.metric, self.mode)
        return trial

    def _is_complete(self, trials: list[Trial], num_trials: int) -> bool:
        # Without a scheduler only a time limit stops a trial, and a search that is resumed has more of it.
        unfinished = ("waiting", "stopped") if self.scheduler is None else ("waiting",)
        return len(trials) == num_trials and not any(trial.status in unfinished for trial in trials)

    def _conclude(self, trials: list[Trial]) -> dict[str, Any]:
        self.results = ranked(trials, self.mode)
        self._best = best_of(trials, self.metric, self.mode)
        self.unread = self._unread(trials)
        if self.unread:
            logger.warning(
                "no trial read %s: the values of this part of search_space changed nothing, and the best"
                " parameters do not include it. Read it in train_fn, or remove it from search_space",
                ", ".join(map(repr, self.unread)),
            )
        return self.best_parameters

    def _unread(self, trials: list[Trial]) -> list[str]:
        """Names of sampled parameters that none of the trials that ended has read."""
        ended = [trial for trial in trials if trial.status in ("finished", "nan")]
        sampled = [name for name, value in self.search_space.items() if not isinstance(value, _FIXED)]
        return [name for name in sampled if ended and all(name in trial.unread for trial in ended)]


def _check_count(field: str, count: Any) -> None:
    if isinstance(count, bool) or not isinstance(count, int) or count < 1:
        raise UserError("must be a positive integer", field=field, got=count, allowed="1, 2, 3, ...")

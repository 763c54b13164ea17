"""A server's head that learns: takes what is answered into the traffic, has rounds made, serves the heads that they
choose, and goes back to the one before where a new one is worse while it serves."""

import contextlib
import dataclasses
import hashlib
import logging
import os
import random
import shutil
import threading
from collections.abc import Iterator
from pathlib import Path

import jax
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from specserve import provenance
from specserve.data.sources import parse_entry
from specserve.drafters.registry import check_trained
from specserve.drafters.speculation import describe, parse_speculation, within_reach
from specserve.errors import CheckpointError, ConfigError, SpecServeError, first_line
from specserve.host import write_whole
from specserve.interop.notes import followed, read_notes
from specserve.learn.learner import LearnerProcess
from specserve.learn.live import MOST_ANSWERS, LiveTaus
from specserve.learn.task import HEAD, ROUND, TRAFFIC, RoundResult, RoundTask
from specserve.learn.traffic import ServedAnswer, Traffic, count_after, load_redact, newest_segment
from specserve.learn.versions import STATIC, HeadVersions, LearnState
from specserve.serve.engine.engine import Engine
from specserve.serve.http.openai.streaming import Hear, WorkOptions
from specserve.serve.launch import Models, find_names, with_version
from specserve.serve.requests.request import Delta, FinishReason, Request
from specserve.serve.settings import ServeRun
from specserve.speculative.sampling import DrawOptions
from specserve.speculative.tree import Tree, chain

logger = logging.getLogger(__name__)

CHECK_SECONDS = 10.0  # between two looks at the taus of what serves
ROUND_SECONDS = 1.0  # between two looks at whether a round is due
BACK_OFF_SECONDS, MOST_BACK_OFF = 60.0, 3600.0  # after a round that failed, doubled each time
SECRET_FILE = "secret"  # by which clients are digested, so that a digest does not show whose it is
ALONE = ("ray", "coordinator", "allow_update_weights", "allow_load_draft")
FINISHED = (FinishReason.STOP, FinishReason.LENGTH)


class LearningHead(Collector):
    """The learning of one server, from its start to its end. It is also the collector of its Prometheus series."""

    def __init__(self, run: ServeRun, models: Models) -> None:
        """Open the folder. Raises ConfigError or CheckpointError where the head cannot learn, or the folder is not for
        it."""
        self._run, self._folder = run, Path(run.learn).expanduser().absolute()
        redact = load_redact(run.learn_redact)
        self._task = _first_task(run, models, self._folder)
        self.versions = HeadVersions(self._folder, models.fingerprint, provenance.fingerprint(Path(self._task.static)))
        state = self.versions.state
        self.live = LiveTaus(state.answers if state.speculation == _drafted_by(run) else {})
        if (served := self._served_folder()) != self._task.static:
            models = with_version(models, self.versions.state.version, "", served)
        self._models: Models | None = models
        try:
            shutil.rmtree(self._folder / ROUND, ignore_errors=True)  # of a server that was killed
            self._secret = _secret(self._folder / SECRET_FILE)
            self._traffic = Traffic(
                self._folder / TRAFFIC,
                most_bytes=int(run.learn_max_gb * 1e9),
                most_seconds=run.learn_max_hours * 3600,
                redact=redact,
                tokenizer=models.tokenizer,
            )
            # of the answers that are kept from now on: less than none, where some wait from before
            self._num_used = -count_after(self._folder / TRAFFIC, state.used)
        except OSError as error:
            raise ConfigError(f"--learn {self._folder}: {error}") from error
        self._model_name = ""  # as clients see it
        self._rounds: dict[str, int] = {}  # by what they chose, or "failed"
        self._num_returns = 0
        self._has_warned = False
        self._last: RoundResult | None = None
        self._closing, self._change = threading.Event(), threading.Lock()
        self._process: LearnerProcess | None = None

    # Of each request.

    def listen(self, request: Request, options: WorkOptions) -> Hear | None:
        """Return the listener of a sequence that the target alone answers."""
        if request.lora or not options.may_learn:
            return None
        is_kept = random.random() < self._run.learn_share
        answer_ids: list[int] = []

        def hear(delta: Delta) -> None:
            if is_kept:
                answer_ids.extend(delta.token_ids)
            if delta.finish_reason is None or delta.stats is None:
                return
            if len(delta.stats.versions) == 1:
                self.live.observe(delta.stats.version, delta.stats.of_drafts)
            if delta.finish_reason in FINISHED and len(answer_ids) > 1:
                digest = hashlib.blake2b(request.client.encode(), key=self._secret, digest_size=6).hexdigest()
                names = [field.name for field in dataclasses.fields(DrawOptions)]
                options = DrawOptions(**{name: getattr(request.params, name) for name in names})
                served = ServedAnswer(request.prompt_ids, tuple(answer_ids), digest, delta.stats.version, options)
                self._traffic.keep(served)

        return hear

    # Of the server.

    @property
    def num_waiting(self) -> int:
        """The answers that are kept and that no judged round has read."""
        return self._traffic.num_kept - self._num_used

    def take_models(self) -> Models:
        """Hand over the models with the version of the head that served last. It keeps none of them."""
        assert self._models is not None
        models, self._models = self._models, None
        return models

    @contextlib.contextmanager
    def beside(self, engine: Engine) -> Iterator[None]:
        """Learn while the engine serves, until the context ends."""
        self._model_name = engine.model_name
        threads = [
            threading.Thread(target=work, args=(engine,), name=f"learn-{name}", daemon=True)
            for name, work in (("rounds", self._make_rounds), ("live", self._watch))
        ]
        for thread in threads:
            thread.start()
        try:
            yield
        finally:
            self._closing.set()
            with self._change:
                if self._process is not None:
                    self._process.kill()
            for thread in threads:
                thread.join()
            self._traffic.close()
            self.remember()

    def _make_rounds(self, engine: Engine) -> None:
        num_failures = 0
        while not self._closing.wait(ROUND_SECONDS):
            if self.num_waiting < self._run.learn_answers:
                continue
            num_kept, version = self._traffic.num_kept, self.versions.state.version
            used = newest_segment(self._folder / TRAFFIC)
            try:
                found = self._make_round(engine)
                if self._closing.is_set():
                    return
                if isinstance(found, RoundResult):
                    num_failures, self._num_used = 0, num_kept
                    self.act(engine, found, version, used)
                    continue
            except Exception as error:  # learning goes on with the next round
                logger.exception("a round of learning")
                found = first_line(error)
            self._count("failed")
            seconds = min(BACK_OFF_SECONDS * 2 ** min(num_failures, 30), MOST_BACK_OFF)
            num_failures += 1
            logger.warning("a round of learning failed, the next one in %.0f s at the earliest: %s", seconds, found)
            self._closing.wait(seconds)

    def _make_round(self, engine: Engine) -> RoundResult | str:
        """Return the judgement of a round, or what went wrong. Requests take its processors where their steps run on
        these."""
        is_on_cpu, seed = jax.default_backend() == "cpu", self.versions.state.num_rounds
        try:
            with self._change:
                if self._closing.is_set():
                    return "the server ends"
                returned = self.versions.folder_of(self.versions.state.returned)
                task = dataclasses.replace(
                    self._task, served=self._served_folder(), returned=str(returned or ""), seed=seed
                )
                self._process = LearnerProcess(task, lambda: is_on_cpu and engine.stats().num_running > 0)
        except OSError as error:
            return str(error)
        return self._process.result()

    def act(self, engine: Engine, result: RoundResult, version: str, used: str = "") -> None:
        """Serve the head that a round has chosen, which was made beside this version and of traffic up to this
        segment."""
        with self._change:
            state = self.versions.state
            if state.version != version:
                logger.info("a round was of version %s, which serves no more: %s", version, result.text)
                return
            logger.info("a round of learning: %s", result.text)
            self._last = result
            self._count(result.choice)
            way, returned = _drafted_by(self._run), state.returned
            if state.judged_by != way:  # tau by another speculation says nothing of the traffic
                state = dataclasses.replace(state, judged_by=way, first_static_tau=result.taus["static"])
            state = dataclasses.replace(state, returned="", num_rounds=state.num_rounds + 1, used=used or state.used)
            try:
                if result.choice == "candidate":
                    name = self.versions.add(self._folder / ROUND / HEAD)
                    self._use(engine, dataclasses.replace(state, version=name, before=version))
                elif result.choice == "returned":
                    self._use(engine, dataclasses.replace(state, version=returned, before=version))
                elif result.choice == "static":
                    self._use(engine, dataclasses.replace(state, version=STATIC, before=STATIC))
                else:
                    self.versions.keep(state)
            except (SpecServeError, OSError) as error:
                logger.warning("the head stays version %s: %s", self.versions.state.version, error)

    def _watch(self, engine: Engine) -> None:
        while not self._closing.wait(CHECK_SECONDS):
            try:
                self.remember()
                self.look_back(engine)
            except Exception:  # the next look may find it well again
                logger.exception("the versions of the head could not be compared")

    def remember(self) -> None:
        """Keep what has been answered by the versions that are compared, so that a restart goes on from there."""
        with self._change:
            state = self._with_answers(self.versions.state)
            if state != self.versions.state:
                try:
                    self.versions.keep(state)
                except OSError as error:
                    if not self._has_warned:  # each look would say it again
                        logger.warning("a restart will not know how version %s has served: %s", state.version, error)
                    self._has_warned = True

    def _with_answers(self, state: LearnState) -> LearnState:
        answers = self.live.kept(state.version, state.before)
        if not answers:  # those of a server with other settings, which may come back
            return state
        return dataclasses.replace(state, answers=answers, speculation=_drafted_by(self._run))

    def look_back(self, engine: Engine) -> None:
        """Go back to the version before where the present one's tau has fallen below what that one had. It may have
        been the traffic that became harder, for each of them: so the next round judges both on the same prompts."""
        with self._change:
            state = self.versions.state
            fallen = self.live.has_fallen(state.version, state.before)
            if fallen is None:
                return
            found, expected = fallen
            logger.warning(
                "version %s of the head has tau %.3f to %.3f while it serves, and version %s had %.3f to %.3f: going "
                "back to that",
                *(state.version, found.low, found.high, state.before, expected.low, expected.high),
            )
            try:
                back = dataclasses.replace(state, version=state.before, before=state.before, returned=state.version)
                self._use(engine, back)
                self._num_returns += 1
            except (SpecServeError, OSError) as error:
                logger.warning("the head stays version %s: %s", state.version, error)

    def _use(self, engine: Engine, state: LearnState) -> None:
        """Serve the version of a state, and keep the state. Raises SpecServeError where it cannot serve."""
        folder = self.versions.folder_of(state.version) or self._task.static
        if state.version != STATIC and folder == self._task.static:
            where = f"{self._folder}: version {state.version}"
            raise CheckpointError(f"{where} is missing under versions, so what serves stays; put its folder back")
        mode = "drain" if self._run.deterministic else "continue"
        engine.update_weights(draft=folder, version=state.version, mode=mode)
        self.live.begin(state.version, state.before)
        try:
            self.versions.keep(self._with_answers(dataclasses.replace(state, answers={})))
        except OSError as error:
            logger.warning("version %s of the head serves, but a restart will not know: %s", state.version, error)

    def _served_folder(self) -> str:
        return str(self.versions.folder_of(self.versions.state.version) or self._task.static)

    def _count(self, result: str) -> None:
        self._rounds[result] = self._rounds.get(result, 0) + 1

    # Prometheus.

    def collect(self) -> Iterator[Metric]:
        state, last = self.versions.state, self._last
        judged = [*last.taus.items()] if last else []
        gauges = (
            ("version", "1 for the version of the head that serves.", "version", [(state.version, 1.0)]),
            ("live_tau", f"tau of the last {MOST_ANSWERS} answers, of steps over draft tokens.", "version",
             [(version, tau) for version, tau, _ in self.live.taus()]),
            ("held_out_tau", "tau on held-out prompts of the last round.", "head", judged),
        )  # fmt: skip
        for name, text, label, found in gauges:
            family = GaugeMetricFamily(f"specserve:learn_{name}", text, labels=["model_name", label])
            for value, number in found:
                family.add_metric([self._model_name, value], number)
            yield family
        text = "Fall of the static head's tau on held-out prompts since the first round: how far traffic has moved."
        family = GaugeMetricFamily("specserve:learn_drift", text, labels=["model_name"])
        if last and state.judged_by == _drafted_by(self._run):  # until a round has ended it is not known
            family.add_metric([self._model_name], state.first_static_tau - last.taus["static"])
        yield family
        counters = (
            ("kept_answers", "Answers written to the folder.", self._traffic.num_kept),
            ("dropped_answers", "Answers left out by the hook, or for want of room.", self._traffic.num_dropped),
            ("returns", "Versions given up because their tau fell while they served.", self._num_returns),
        )
        for name, text, number in counters:
            counter = CounterMetricFamily(f"specserve:learn_{name}", text, labels=["model_name"])
            counter.add_metric([self._model_name], number)
            yield counter
        rounds = CounterMetricFamily("specserve:learn_rounds", "Rounds, by result.", labels=["model_name", "result"])
        for result, number in [*self._rounds.items()]:
            rounds.add_metric([self._model_name, result], number)
        yield rounds


def check_settings(run: ServeRun) -> None:
    """Check that the settings go with a head that learns. Raises ConfigError."""
    for name in ALONE:
        if getattr(run, name):
            raise ConfigError(
                f"--learn: not with --{name.replace('_', '-')}; one process alone changes its head as it learns"
            )
    load_redact(run.learn_redact)
    for entry in run.learn_data:
        try:
            parse_entry(entry)
        except ConfigError as error:
            raise ConfigError(f"--learn-data: {error}") from error


def _first_task(run: ServeRun, models: Models, folder: Path) -> RoundTask:
    """Return what is the same in all rounds. Raises ConfigError where the head cannot learn."""
    name, static = find_names(run.target, run.draft)
    if models.head is None or static is None:
        raise ConfigError("--learn: no draft head with a folder of its own; train one first, and give it with --draft")
    check_trained(models.head.drafter.name, "--learn")
    notes = read_notes(static)
    if "lora" in notes:
        raise ConfigError(
            f"--learn: the head of {static} follows {followed(notes)}, and answers of adapters are not learnt from; "
            "expected a head of the plain target: train one without --lora, and give it with --draft"
        )
    trained_on = notes.get("target_fingerprint", models.fingerprint)
    if trained_on != models.fingerprint:
        raise ConfigError(
            f"--learn: the head of {static} was trained for other weights of the target; train one for these"
        )
    if models.head_quantization == "stored":
        raise ConfigError("--learn: the head is in few bits as its files store it; give one in floats")
    tree: Tree = within_reach([chain(3), chain(2), chain(1)], models.head.drafter)[0]
    if run.speculation != "auto":
        asked = parse_speculation(run.speculation)
        if asked is None or not asked.uses_head:
            raise ConfigError(f"--learn: --speculation {run.speculation} uses no head; give auto, a chain or a tree")
        tree = tree if asked.lookup else asked
    return RoundTask(
        str(folder),
        name,
        str(static.resolve()),
        str(static.resolve()),
        models.head.drafter.name,
        describe(tree),
        run.learn_steps,
        0,
        first_data=run.learn_data,
        quantization=models.quantization,
        draft_quantization=models.head_quantization,
        drafter_module=run.drafter_module,
    )


def _drafted_by(run: ServeRun) -> str:
    """Return the settings that move tau whichever head drafts."""
    return f"{run.speculation} {run.quantization} {run.draft_quantization} {run.kv_cache_dtype}"


def _secret(path: Path) -> bytes:
    """Return the secret of a folder, which is made at its first use."""
    if not path.exists():
        write_whole(path, os.urandom(32))
    return path.read_bytes()

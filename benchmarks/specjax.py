"""Training beside SpecJAX itself: its published trainer and this package's learn from the same conversations, in turns.

    python benchmarks/specjax.py --conversations 400 --rounds 3
    python benchmarks/specjax.py --source ../SpecJAX      # a checkout that is there already, of any commit

The first run makes an environment for SpecJAX and clones it. Its code runs as it is published, its loop, its data
loader and its optimiser included, with three things changed from outside: numbers are float32 where it asks for
bfloat16, which CPUs emulate; the draft vocabulary has the size that is asked for; and no checkpoint is written.
"""

import argparse
import contextlib
import dataclasses
import json
import math
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from environments import environment, report, run, say
from side_by_side import BenchmarkError, tail

ROOT = Path(__file__).resolve().parent.parent
REPOSITORY = "https://github.com/tails-mpt/SpecJAX"
COMMIT = "d047ed49c71fb13c470f9953674dba5863a005a4"
MARK = "@ "  # begins a line by which the peer reports


@dataclasses.dataclass(frozen=True)
class Epoch:
    """What an arm did in one turn, which is one pass over the conversations."""

    seconds: float
    useful: int  # tokens of the assistant's, which are what a head has to learn
    tokens: int  # of the conversations: what is not padding
    positions: int  # padding included


@dataclasses.dataclass(frozen=True)
class Facts:
    """A conversation as SpecJAX should see it: how many tokens it has, and which of them bear loss."""

    length: int
    loss_mask: list[bool]


class Ours:
    """This package's step over packed rows."""

    name = "specserve"

    def __init__(self, options: argparse.Namespace, documents: Sequence[Any], target: Any, target_ids: Any) -> None:
        from training import PackedArm

        from specserve.data.loader import Loader
        from specserve.data.packing import pack
        from specserve.drafters.registry import DraftSettings
        from specserve.train.head import new_drafter
        from specserve.train.settings import TrainSettings
        from specserve.train.step import loss_config

        settings = TrainSettings(batch_size=options.batch_size, seq_len=options.seq_len, rollout=options.rollout)
        rows = pack(documents, options.seq_len)
        self._num_steps = math.ceil(len(rows) / options.batch_size)
        self._num_tokens = sum(map(len, documents)) / len(rows)  # in a row
        self._batch_size = options.batch_size
        config = loss_config(
            settings, target.config, new_drafter("eagle3", DraftSettings(), target.config, len(target_ids))
        )
        self._arm = PackedArm(config, settings, target, target_ids, Loader(rows, options.batch_size, settings.seed))
        self._arm.warm_up()

    def epoch(self) -> Epoch:
        begin = time.perf_counter()
        useful, positions = self._arm.run(self._num_steps)
        seconds = time.perf_counter() - begin
        return Epoch(seconds, useful, round(self._num_tokens * self._num_steps * self._batch_size), positions)


class Peer:
    """SpecJAX in a process of its own, which waits for each of its turns; in a `with`."""

    name = "SpecJAX"

    def __init__(self, options: argparse.Namespace, python: Path, source: Path, folder: Path) -> None:
        self.log = folder / "specjax.log"
        given = {
            "num_epochs": options.rounds + 1,  # the first one compiles
            **{name: getattr(options, name) for name in ("batch_size", "seq_len", "rollout", "draft_vocab_size")},
        }
        command = [str(python), __file__, "_peer", str(source), str(folder), json.dumps(given)]
        with self.log.open("wb") as errors:
            self._process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True, cwd=folder
            )

    def __enter__(self) -> "Peer":
        return self

    def __exit__(self, *_exc: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(10)
        self._process.kill()
        with contextlib.suppress(BrokenPipeError):
            self._process.communicate()  # closes the pipes

    def epoch(self) -> Epoch:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write("go\n")
            self._process.stdin.flush()
        for line in self._process.stdout:
            if line.startswith(MARK):
                return Epoch(**json.loads(line[len(MARK) :]))
        raise BenchmarkError(f"SpecJAX ended. The last lines of {self.log}:\n{tail(self.log)}")


def peer_here(source: str, folder: str, given: str) -> None:
    """Run SpecJAX's own `train` in its environment, over the data in `folder`, an epoch for each line of stdin."""
    sys.path.insert(0, source)
    settings: dict[str, Any] = json.loads(given)
    import jax
    import jax.numpy as jnp
    import ml_dtypes
    import numpy as np
    import specjax.train as trainer  # pyright: ignore[reportMissingImports]

    jnp.bfloat16 = jnp.float32  # type: ignore[misc]
    ml_dtypes.bfloat16 = np.float32  # type: ignore[misc]
    facts = [Facts(**fact) for fact in json.loads((Path(folder) / "facts.json").read_text())]
    turn: dict[str, Any] = {}

    class Turns(trainer.DataLoader):
        """Its own loader, which waits for the turn before it hands out the batches of an epoch."""

        def __iter__(self) -> Iterator[Any]:
            chosen = [index for batch in self.batch_sampler for index in batch]
            batches = list(super().__iter__())
            for index in chosen:
                found = int(self.dataset[index][1].sum())
                assert found == min(facts[index].length, settings["seq_len"]), (index, found, facts[index].length)
            turn["useful"] = sum(sum(facts[index].loss_mask[: settings["seq_len"]]) for index in chosen)
            turn["tokens"] = sum(int(batch["attention_mask"].sum()) for batch in batches)
            turn["positions"] = sum(batch["input_ids"].size for batch in batches)
            sys.stdin.readline()
            turn["begin"] = time.perf_counter()
            return iter(batches)

    def report(params: Any, *_args: Any, **_keywords: Any) -> None:  # where an epoch's checkpoint would be written
        jax.block_until_ready(params)
        if "begin" in turn:
            seconds = time.perf_counter() - turn.pop("begin")
            print(MARK + json.dumps({"seconds": seconds, **turn}), flush=True)

    def config(*args: Any, **keywords: Any) -> Any:
        made = own_config(*args, **keywords)
        made.draft_vocab_size = settings["draft_vocab_size"]
        return made

    own_config, trainer._eagle3_config_from_target = trainer._eagle3_config_from_target, config
    trainer.DataLoader, trainer.save_eagle3_checkpoint = Turns, report
    trainer.validate_eagle3_checkpoint = lambda *_args: None
    flags = {
        "target-model-path": f"{folder}/target",
        "target-model-type": "qwen3",
        "data-path": f"{folder}/data.jsonl",
        "output-dir": f"{folder}/output",
        "num-epochs": settings["num_epochs"],
        "max-length": settings["seq_len"],
        "batch-size": settings["batch_size"],
        "grad-accum-steps": 1,
        "ttt-length": settings["rollout"],
        "tp": 1,
    }
    sys.argv = ["specjax-train", *(str(part) for name, value in flags.items() for part in (f"--{name}", value))]
    trainer.main()


def write_data(options: argparse.Namespace, folder: Path) -> tuple[list[Any], Any, Any]:
    """Write what SpecJAX reads: the conversations, the bundled target in float32, and the facts by which it is checked
    that both see the same tokens. Returns our documents of them, the target, and the draft vocabulary."""
    import jax.numpy as jnp
    import numpy as np
    from safetensors.flax import load_file, save_file

    from specserve.checkpoints.load import load_target
    from specserve.checkpoints.source import BUNDLED_FOLDER
    from specserve.data import sources
    from specserve.data.documents import tokenize
    from specserve.mesh import default_dtype
    from specserve.tokenizer import Tokenizer

    chosen = sources.load("pydoc", split="train")
    order = np.random.default_rng(0).permutation(len(chosen))[: options.conversations]
    rows = [chosen[i] for i in order]
    tokenizer = Tokenizer.load(BUNDLED_FOLDER)
    with (folder / "data.jsonl").open("w") as file:
        file.writelines(json.dumps({"messages": row.as_dicts()}) + "\n" for row in rows)
    whole = tokenize(rows, tokenizer, 1 << 20)
    if whole.origins != list(range(len(rows))):
        raise BenchmarkError("not every conversation became one document")
    facts = [Facts(len(document), document.loss_mask.tolist()) for document in whole.documents]
    (folder / "facts.json").write_text(json.dumps([dataclasses.asdict(fact) for fact in facts]))
    (folder / "target").mkdir(exist_ok=True)
    for path in BUNDLED_FOLDER.iterdir():
        if path.suffix == ".safetensors":
            save_file({k: v.astype(jnp.float32) for k, v in load_file(path).items()}, folder / "target" / path.name)
        elif path.is_file():
            (folder / "target" / path.name).write_bytes(path.read_bytes())
    target = load_target(BUNDLED_FOLDER, dtype=default_dtype())
    target_ids = np.arange(min(options.draft_vocab_size, target.config.vocab_size), dtype=np.int32)
    return tokenize(rows, tokenizer, options.seq_len).documents, target, target_ids


def table(epochs: dict[str, list[Epoch]]) -> str:
    """Make a row for each arm, of medians over its turns; ratios are of turns of one round."""
    lines = ["| | useful tokens/s | tokens/s | positions/s | padding | useful, to SpecJAX |", "|" + "---|" * 6]
    for name, own in epochs.items():
        speeds = [statistics.median(getattr(e, what) / e.seconds for e in own) for what in ("useful", "tokens")]
        positions = statistics.median(e.positions / e.seconds for e in own)
        padding = 1 - sum(e.tokens for e in own) / sum(e.positions for e in own)
        ratios = sorted(
            ours.useful / ours.seconds / (theirs.useful / theirs.seconds)
            for ours, theirs in zip(own, epochs[Peer.name], strict=True)
        )
        ratio = f"{statistics.median(ratios):.2f} ({ratios[0]:.2f}-{ratios[-1]:.2f})"
        lines.append(f"| {name} | {speeds[0]:.0f} | {speeds[1]:.0f} | {positions:.0f} | {padding:.1%} | {ratio} |")
    return "\n".join(lines)


def compare(options: argparse.Namespace) -> dict[str, Any]:
    """Let both train in turns and print the table; returns what was measured, ready for JSON."""
    import jax
    import optax

    from specserve.host import cache_folder
    from specserve.provenance import collect

    folder = (options.cache or cache_folder() / "benchmarks" / "specjax").absolute()
    packages = (f"jax=={jax.__version__}", f"optax=={optax.__version__}", "safetensors", "transformers", "jinja2")
    python = environment(folder, (*packages, "ml-dtypes", "numpy"))
    source = options.source.absolute() if options.source else folder / "SpecJAX"
    if not options.source and not source.is_dir():
        say(f"cloning {REPOSITORY}")
        part = source.with_suffix(".part")
        run(["git", "clone", REPOSITORY, part], folder / "git.log", "git clone (--source FOLDER takes a checkout)")
        run(["git", "-C", part, "checkout", COMMIT], folder / "git.log", "git checkout")
        part.rename(source)
    if not (source / "specjax" / "train.py").is_file():
        raise BenchmarkError(f"--source {source}: there is no specjax/train.py in that folder")
    documents, target, target_ids = write_data(options, folder)
    epochs: dict[str, list[Epoch]] = {Ours.name: [], Peer.name: []}
    with Peer(options, python, source, folder) as peer:
        say("compiling")
        ours = Ours(options, documents, target, target_ids)
        peer.epoch()
        for number in range(options.rounds):
            say(f"round {number + 1} of {options.rounds}")
            for arm in (ours, peer) if number % 2 == 0 else (peer, ours):
                epochs[arm.name].append(arm.epoch())
    print(table(epochs))
    return {
        "settings": vars(options),
        "epochs": {name: [dataclasses.asdict(epoch) for epoch in own] for name, own in epochs.items()},
        "provenance": collect(),
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    add = parser.add_argument
    add("--source", type=Path, help=f"folder with SpecJAX's code; else {REPOSITORY} is cloned at {COMMIT[:7]}")
    add("--conversations", type=int, default=400, help="of pydoc, that both learn from (%(default)s)")
    add("--rounds", type=int, default=3, help="turns of each, a pass over all conversations (%(default)s)")
    add("--batch-size", type=int, default=8, help="rows in a step (%(default)s)")
    add("--seq-len", type=int, default=256, help="tokens of a row, and of a conversation at most (%(default)s)")
    add("--rollout", type=int, default=4, help="steps that the head is unrolled (%(default)s)")
    add("--draft-vocab-size", type=int, default=4096, help="tokens that the head can propose (%(default)s)")
    add("--cache", type=Path, help="folder for SpecJAX's environment, its code and the data")
    add("--output", type=Path, help="write everything that was measured to this JSON file")
    options = parser.parse_args()
    if min(options.rounds, options.batch_size, options.rollout) < 1 or options.conversations < 8 * options.batch_size:
        parser.error("--rounds, --batch-size and --rollout must be at least 1, --conversations 8 times --batch-size")
    sys.path.insert(0, str(ROOT))
    return report(lambda: compare(options), options.output)


if __name__ == "__main__":
    if sys.argv[1:2] == ["_peer"]:
        peer_here(*sys.argv[2:])
    else:
        sys.exit(main())

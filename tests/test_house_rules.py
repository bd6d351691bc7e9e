"""The rules of the house, as a test: what a review would otherwise have to say again and again."""

from __future__ import annotations

import ast
import re
from pathlib import Path

from walstream.config import fields, rules

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src"
MODULES = sorted(SOURCE.rglob("*.py"))
TEXTS = sorted(
    file
    for pattern in ("src/**/*", "tests/**/*", "bench/**/*", "docs/**/*", "deploy/**/*", ".ci/*", "*")
    for file in ROOT.glob(pattern)
    if file.is_file()
    and file.name != ".git"
    and file.suffix in {".py", ".md", ".toml", ".txt", ".svg", ".lock", ".json", ""}
)

LINES_MAX = 800
"""A file holds a concept, however long that is; beyond this it usually holds two."""

# Clock, randomness, network and disk enter these as arguments, so that a simulator can stand in for the world.
SANS_IO = (
    "walstream/log/append_clock.py",
    "walstream/log/batch.py",
    "walstream/log/records.py",
    "walstream/log/epochs.py",
    "walstream/log/producers.py",
    "walstream/log/compression.py",
    "walstream/log/continuity.py",
    "walstream/log/received.py",
    "walstream/log/salvage.py",
    "walstream/log/waiting.py",
    "walstream/log/retention.py",
    "walstream/log/stamps.py",
    "walstream/node/acl.py",
    "walstream/node/framing.py",
    "walstream/node/primitives.py",
    "walstream/node/sasl.py",
    "walstream/node/wire.py",
    "walstream/node/groups/[!s]*.py",  # all but the shell, service.py
    "walstream/node/groups/subscription.py",
    "walstream/replication/**/*.py",
    "walstream/positions.py",
    "walstream/postgres/protocol.py",
    "walstream/postgres/messages.py",
    "walstream/postgres/pgoutput.py",
    "walstream/postgres/relations.py",
    "walstream/postgres/types.py",
    "walstream/postgres/failures.py",
    "walstream/postgres/identity.py",
    "walstream/capture/envelope.py",
    "walstream/capture/commit_points.py",
    "walstream/capture/chain.py",
    "walstream/capture/ledger.py",
    "walstream/capture/groups.py",
    "walstream/capture/resuming.py",
    "walstream/capture/snapshot_copy.py",
    "walstream/capture/snapshot_plan.py",
    "walstream/capture/arrays.py",
    "walstream/capture/codegen.py",
    "walstream/capture/columns.py",
    "walstream/capture/escaping.py",
    "walstream/capture/outbox.py",
    "walstream/capture/provenance.py",
    "walstream/capture/rendering.py",
    "walstream/capture/shapes.py",
    "walstream/capture/streams.py",
    "walstream/feed/auth/identity.py",
    "walstream/feed/auth/keysets.py",
    "walstream/feed/service/batching.py",
    "walstream/feed/service/demand.py",
    "walstream/feed/received.py",
    "walstream/feed/service/responses.py",
    "walstream/feed/service/resume.py",
    "walstream/feed/service/send_queue.py",
    "walstream/feed/service/watermarks.py",
    "walstream/feed/reading/calls.py",
    "walstream/feed/reading/contexts.py",
    "walstream/feed/reading/entries.py",
    "walstream/feed/reading/frames.py",
    "walstream/feed/reading/merge.py",
    "walstream/feed/reading/regions.py",
    "walstream/feed/reading/wire.py",
    "walstream/feed/transactions/facts.py",
    "walstream/feed/transactions/parts.py",
    "walstream/spark/admission.py",
    "walstream/spark/batches.py",
    "walstream/spark/belonging.py",
    "walstream/spark/decoding.py",
    "walstream/spark/layouts.py",
    "walstream/spark/offsets.py",
    "walstream/spark/options.py",
    "walstream/spark/planning.py",
    "walstream/spark/rowwise.py",
    "walstream/spark/rule.py",
    "walstream/spark/small/folding.py",
    "walstream/spark/types.py",
    "walstream/spark/values.py",
    "walstream/spark/warehouse.py",
)
IO = {"asyncio", "socket", "time", "random", "threading", "os"}

MACHINE_PATH = re.compile(r"(?<![\w.$~{}<>-])/(?:home|root|Users|work|workspace)/[\w.-]+")


def name_of(file: Path) -> str:
    return str(file.relative_to(ROOT))


def parsed(module: Path) -> ast.Module:
    return ast.parse(module.read_text(encoding="utf-8"), filename=str(module))


def imports(module: Path) -> set[str]:
    """Return the first part of every module that is imported, in functions too, but not those for types alone."""
    tree, found = parsed(module), set()
    for_types = [
        inner
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test)
        for inner in ast.walk(node)
    ]
    for node in ast.walk(tree):
        if node in for_types:
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name.split(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.split(".")[0])
    return found


def test_there_is_something_to_check() -> None:
    assert len(MODULES) > 10
    assert len(TEXTS) > 20


def test_pure_modules_touch_no_clock_disk_network_or_dice() -> None:
    pure = [(pattern, sorted(SOURCE.glob(pattern))) for pattern in SANS_IO]
    assert not [pattern for pattern, modules in pure if not modules], "a pattern that matches no module checks nothing"
    found = {name_of(module): imports(module) & IO for _, modules in pure for module in modules}
    assert not {name: forbidden for name, forbidden in found.items() if forbidden}


def test_every_module_opens_with_a_docstring() -> None:
    missing = [name_of(module) for module in MODULES if not ast.get_docstring(parsed(module))]
    assert not missing, "say what the module does and the invariant it keeps"


def test_no_module_is_too_long() -> None:
    lengths = {name_of(module): len(module.read_text(encoding="utf-8").splitlines()) for module in MODULES}
    assert not {name: lines for name, lines in lengths.items() if lines > LINES_MAX}, "split it by concept"


def test_no_word_without_a_job_names_a_module() -> None:
    assert not [name_of(module) for module in MODULES if module.stem in {"util", "utils", "helpers", "common", "misc"}]


def test_no_path_of_somebodys_machine() -> None:
    found = [
        f"{name_of(file)}:{number}: {match[0]}"
        for file in TEXTS
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1)
        for match in MACHINE_PATH.finditer(line)
    ]
    assert not found


def test_every_setting_is_read_somewhere() -> None:
    code = "\n".join(module.read_text(encoding="utf-8") for module in MODULES if module.parent.name != "config")
    keys = [name.split(".")[-1] for name, _ in fields()] + [
        key for rule in rules().values() for key in rule.model_fields
    ]
    assert not [key for key in keys if not re.search(rf"\.{key}\b", code)]


def test_lock_holds_hashes_and_no_addresses() -> None:
    lock = (ROOT / "requirements.lock").read_text(encoding="utf-8")
    assert not re.search(r"https?:|--index-url|--extra-index-url|--find-links|file:", lock)
    pinned = re.findall(r"^[a-z0-9_.-]+==", lock, flags=re.MULTILINE)
    assert len(pinned) > 20
    assert lock.count("--hash=sha256:") >= len(pinned)

"""Which test runs or compares each fenced block of the documents, or why it is only parsed: one table."""

from __future__ import annotations

from dataclasses import dataclass

ENGINE = "needs an environment with an engine, made over the network"
SERVER = "needs a running server of another program"
GPU = "needs a GPU"
HOURS = "takes hours of CPU time"
MINUTES = "makes a table, which takes minutes of CPU time"
DOWNLOAD = "needs a trace of 12,031 requests that the reader downloads; the sample takes minutes"
INSTALLS = "installs from the network, then runs everything"
RANKS = "takes four processes and a minute; stress/ranks/test_real_processes.py runs these ranks with fewer requests"
PRICED = frozenset({0, 3, 4})
"""What the gate says of prices depends on the machine; a finding or an error is neither of them."""


@dataclass(frozen=True, slots=True)
class By:
    """A test that runs the block, or compares it with what it was cut from: file::function below tests/."""

    test: str


@dataclass(frozen=True, slots=True)
class Runs:
    """Run here. codes: the exit code of each kvcheck line, in order, or those that it may have."""

    codes: tuple[int | frozenset[int], ...]


@dataclass(frozen=True, slots=True)
class Parsed:
    """Not run, and why."""

    why: str


Row = By | Runs | Parsed
BUGS_CODE = "commands/test_bugs_page.py::test_every_function_that_is_named_exists_and_the_code_shown_is_its_code"
BUGS_RUN = "commands/test_bugs_page.py::test_red_command_exits_1_with_the_code_that_the_page_names"
OWN_CODE = "commands/test_own_code_page.py::test_the_example_is_red_for_each_bug_and_green_without_as_the_page_shows"
OWN_ENGINE = "commands/test_own_target.py::test_the_commands_of_the_page_end_as_it_says"
FIRST_RED = "commands/test_readme.py::test_the_first_red_prints_the_sample"
BISECT = "probes/test_bisect.py::test_the_recipe_finds_the_commit"
HERE = "test_blocks_run.py::"

REGISTER: dict[str, dict[str, Row]] = {  # by document, and by how the first line of the block begins
    "README.md": {
        "export PIP_EXTRA": Parsed(INSTALLS),
        "kvcheck stress --mutant": By(FIRST_RED),
        "FAIL  retract-resume": By(FIRST_RED),
    },
    "ARCHITECTURE.md": {"kernels <": Parsed("a drawing; the contracts of import-linter have the order")},
    "HACKING.md": {
        ".venv/bin/python -m pytest": Runs((0,)),
        ".venv/bin/python -m pdb": Runs((1,)),
        "--- a/kvcheck": By("test_documents.py::test_the_worked_example_of_a_mutant_applies"),
    },
    "docs/bugs.md": {
        **dict.fromkeys(("def get(self", "for space, buffer", "for layer in", "for producer in"), By(BUGS_CODE)),
        **dict.fromkeys(("if not (_holds", "moved = []", "copy = np", "# The digest", "least = ["), By(BUGS_CODE)),
        **dict.fromkeys(("kvcheck stress retract-resume", "kvcheck stress pd-transfer"), By(BUGS_RUN)),
        **dict.fromkeys((f"kvcheck stress hicache --shape {name}" for name in ("glm", "llama")), By(BUGS_RUN)),
        "kvcheck stress nvlink-aux": By(BUGS_RUN),
    },
    "docs/engines.md": {
        "kvcheck env sglang==": Parsed(ENGINE),
        "kvcheck env --source": Parsed(ENGINE),
        "#!/bin/sh": By(BISECT),
        "cd ~/sglang": By(BISECT),
    },
    "docs/releases.md": {
        "kvcheck report runs/RUN": Runs((0,)),
        "kvcheck gate runs/RUN": Runs((0,)),
        "PYTHONPATH=tests python -m tools.engines.fork": Parsed(ENGINE),
    },
    "docs/engines-gpu.md": {"kvcheck env": Parsed(GPU)},
    "docs/mooncake.md": {"kvcheck probe": Parsed(ENGINE)},
    "docs/first-red.md": {
        "pip install torch": Parsed(INSTALLS),
        "kvcheck stress --mutant": Runs((1, 0, 0)),
        "kvcheck replay": Runs((1, 0)),
    },
    "docs/five-bugs.md": {"kvcheck show": Runs((0, 0))},
    "docs/gate.md": {
        "kvcheck stress --out runs": Runs((0, 0, PRICED)),
        "[[budget]]": By(f"{HERE}test_the_budgets_of_the_page_are_read"),
        "kvcheck baseline save": Runs((0, 0, 0, 0)),
        "[[finding]]": By(f"{HERE}test_the_baseline_of_the_page_is_read"),
        "kvcheck compare": Runs((1,)),
    },
    "docs/threads.md": {"kvcheck stress": Runs((0, 1, 1))},
    "docs/gpu.md": {"kvcheck stress --device": Parsed(GPU)},
    "docs/live-gpus.md": {
        "kvcheck model make": Parsed(SERVER),
        "python -m sglang": Parsed(SERVER),
        "SGLANG_MOONCAKE": Parsed(SERVER),
    },
    "docs/bench-serve.md": {"kvcheck model": Parsed(SERVER)},
    "docs/live.md": {
        "kvcheck model make known": Parsed(SERVER),
        "VLLM_CPU": Parsed(SERVER),
        "kvcheck model make tiny": Runs((0,) * 7),
        "<begin>": By(f"{HERE}test_the_walk_of_the_page_has_the_answer_of_the_model"),
    },
    "tools/mutation/README.md": {
        "python -m tools.mutation --sample": Parsed(HOURS),
        "[{": By(f"{HERE}test_the_bug_by_hand_of_the_page_can_be_put_in"),
    },
    "docs/own-code.md": {
        "@pytest": By(OWN_CODE),
        **dict.fromkeys(("pip install .", "KV304", "KV305", "KV201", "kvcheck report"), By(OWN_CODE)),
    },
    "docs/own-model.md": {
        "kvcheck live": Parsed(SERVER),
        "kvcheck model reference": Parsed(SERVER),
    },
    "docs/own-engine.md": {
        "cd docs": By(OWN_ENGINE),
        "kvcheck stress retract-resume --shape": By(OWN_ENGINE),
        "kvcheck stress retract-resume hicache": By(OWN_ENGINE),
    },
    "docs/reading-a-report.md": {"kvcheck show": Runs((0, 0, 0))},
    "docs/seeds.md": {
        "kvcheck stress --seeds 1-1000": Parsed(HOURS),
        "kvcheck stress --requests 3": Parsed(HOURS),
        "kvcheck stress --seeds 1-100 ": Parsed(HOURS),
    },
    "docs/schedules.md": {
        "kvcheck shrink": Runs((1,)),
        "kvcheck stress retract-resume --decoder": Runs((0,)),
        "kvcheck stress retract-resume --shape llama-3-micro": Runs((0,)),
        "kvcheck stress retract-resume --trace": Parsed(DOWNLOAD),
    },
    "docs/settings.md": {"[tool.kvcheck.stress]": By(f"{HERE}test_the_settings_of_the_page_count")},
    "docs/transports.md": {"kvcheck stress pd-transfer": Parsed(RANKS)},
    "reports/published/README.md": {"kvcheck show": Runs((0, 0, 0))},
    "reports/published/cpu/README.md": {"python -m tools.tables.decoder_table": Parsed(MINUTES)},
    "reports/published/cpu/search/README.md": {"PYTHONPATH=tests": Parsed(MINUTES)},
    "reports/published/engines/README.md": {"kvcheck probe": Parsed(ENGINE)},
    "reports/published/engines/transfers/README.md": {
        "python -m tools.engines.transfer_table": Parsed(ENGINE),
        "kvcheck probe": Parsed(ENGINE),
    },
    "reports/published/known-answers/README.md": {
        "PYTHONPATH=tests python -m tools.tables.damage": Parsed(HOURS),
        "PYTHONPATH=tests python -m tools.tables.margin": Parsed(HOURS),
        "REAL_TRANSFORMERS": Parsed("needs an environment with transformers"),
    },
    "reports/published/serve/README.md": {"python -m tools.servers.serve_prices": Parsed(ENGINE)},
    "reports/README.md": {"import json": By(f"{HERE}test_the_lines_that_read_records_run")},
}

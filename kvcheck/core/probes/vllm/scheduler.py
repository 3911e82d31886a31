"""Probe scheduler: vLLM's own scheduler plans the steps. Tokens that it counts as computed must have been computed.

Subjects are its policies. A threshold cuts prompts into pieces, so that one step may admit a request, give it blocks,
and preempt it for another. One subject has no threshold, and a draft model with lookahead slots.
"""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from kvcheck.core.probes.frame.guard import fitted
from kvcheck.core.probes.frame.probe import Rig
from kvcheck.core.probes.frame.request_generator import LENGTH, TrackedRequest, finish_requests, token
from kvcheck.core.probes.vllm.block_bytes import BLOCK, DEVICE_NEEDS, BlockBytes, cache_config, request_generator

POOL = 14
LONGEST = 36
OUTPUTS = 8
REQUESTS = 20
RUNNING = 4
LONG, SHORT, SQUEEZES = 40, 12, 10
BUDGET = 16
PIECE = 8
STEPS = 900
POLICIES = ("fcfs", "priority")
LOOKAHEAD = "priority-lookahead"
DRAFTS = 3
TURNS, SAID, SWIFT = 12, 31, 6
"""Pairs of a conversation, and their prompts: with slots ahead, 36 tokens of one and 9 of the other fill the pool."""
MODEL = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 8,
    "intermediate_size": 8,
    "num_hidden_layers": 1,
    "num_attention_heads": 1,
    "num_key_value_heads": 1,
    "vocab_size": 1 << 20,
    "max_position_embeddings": LENGTH,
}
CONFIGS = ("config", "config.model", "config.scheduler", "config.cache", "config.parallel", "config.device")


class Scheduling:
    def needs(self, subject: str) -> tuple[str, ...]:
        own = ("config.speculation",) if subject == LOOKAHEAD else ()
        return (*DEVICE_NEEDS, *CONFIGS, *own, "scheduler", "scheduler.output", "scheduler.grammars")

    def control(self, rig: Rig) -> None:
        run = SchedulerRun(rig, LENGTH // BLOCK + 2)
        run.add(run.generator.unshared(LONGEST, OUTPUTS, 0))
        for _ in range(OUTPUTS):
            run.step()

    def measure(self, rig: Rig) -> None:
        run = SchedulerRun(rig, POOL)
        for _ in range(REQUESTS):
            run.add(run.generator.draw(LONGEST, OUTPUTS))
            for _ in range(rig.mix.below(4)):
                run.judged_step()
        run.work()
        if rig.subject == LOOKAHEAD:
            run.conversations()
        for _ in range(SQUEEZES):
            run.add(run.generator.unshared(LONG - rig.mix.below(BLOCK), 2, 2))
            run.step()
            run.add(run.generator.unshared(SHORT - rig.mix.below(BLOCK), 1 + rig.mix.below(BLOCK), 0))
            run.work()
        run.blocks.account([], "with all requests finished")


class SchedulerRun:
    """A scheduler with its requests. transfer: the configuration of a connector, or None."""

    def __init__(self, rig: Rig, blocks: int, transfer: Any = None) -> None:
        self.rig = rig
        with tempfile.TemporaryDirectory() as folder:
            self.scheduler: Any = rig.measured(
                lambda: _scheduler(rig, blocks, folder, transfer), "making the scheduler"
            )
        self.blocks = BlockBytes(rig, self.scheduler.kv_cache_manager, blocks)
        self.generator = request_generator(rig)
        self.unfinished: dict[str, TrackedRequest] = {}

    def add(self, tracked: TrackedRequest) -> None:
        self.unfinished[tracked.name] = tracked
        self.rig.measured(lambda: self.scheduler.add_request(tracked.request), "add_request")

    def work(self) -> None:
        finish_requests(self.rig, self.unfinished, self.judged_step, STEPS)

    def conversations(self) -> None:
        """The short prompt needs a block more in the step that gives the long one the last token of a block. The long
        one's next turn reads all of it."""
        for _ in range(TURNS):
            more = self.rig.mix.below(BLOCK)
            first = self.generator.unshared(SAID + more, 6 - more + self.rig.mix.below(2), 2)
            self.add(first)
            for _ in range(3):
                self.judged_step()
            self.add(self.generator.unshared(SWIFT + more, 6 - more, 0))
            self.work()
            self.add(self.generator.continuing(first, 2, 1))
            self.work()

    def judged_step(self) -> None:
        self.step()
        left = [tracked for tracked in self.unfinished.values() if tracked.request in self.scheduler.running]
        self.blocks.account(left, "after a step")

    def step(self) -> None:
        plan = self.rig.measured(self.scheduler.schedule, "schedule")
        counts: dict[str, int] = dict(plan.num_scheduled_tokens)
        running = [tracked for tracked in self.unfinished.values() if tracked.request in self.scheduler.running]
        for tracked in self.unfinished.values():
            tracked.table = self.blocks.table(tracked) if tracked in running else ()
            self._count(tracked, counts.get(tracked.name, 0))
        served = [tracked for tracked in running if tracked.name in counts]
        self.begin_pass(plan)
        for tracked in served:
            end = int(tracked.request.num_computed_tokens)
            self.blocks.write(tracked, end - counts[tracked.name], end, running)
        for tracked in served:
            self.blocks.read(tracked, int(tracked.request.num_computed_tokens), "reads what is counted as computed")
        self._answer(plan, served)
        gone = [name for name, tracked in self.unfinished.items() if tracked.request.is_finished()]
        for name in gone:
            del self.unfinished[name]

    def begin_pass(self, plan: Any) -> None:
        """Work of a connector's worker before a pass computes."""

    def end_pass(self, plan: Any) -> Any:
        """The report of a connector's worker after a pass; None without a connector."""

    def _count(self, tracked: TrackedRequest, scheduled: int) -> None:
        preempted = int(tracked.request.num_preemptions)
        if preempted > tracked.preemptions:
            self.rig.judge.count("retractions", preempted - tracked.preemptions)
            tracked.preemptions, tracked.is_waiting = preempted, True
        if scheduled and tracked.is_waiting:
            self.rig.judge.count("resumes", int(preempted > 0))
            hit = int(tracked.request.num_computed_tokens) - scheduled
            self.rig.judge.count("lookups")
            self.rig.judge.count("pages_wanted", (int(tracked.request.num_tokens) - 1) // BLOCK)
            self.rig.judge.count("device_hit_pages", hit // BLOCK)
            tracked.is_waiting = False

    def _answer(self, plan: Any, served: list[TrackedRequest]) -> None:
        names = [tracked.name for tracked in served]
        tokens = [
            [token(tracked.number, int(tracked.request.num_tokens))] if _is_whole(tracked) else [] for tracked in served
        ]
        offered = {
            "req_ids": names,
            "req_id_to_index": {name: at for at, name in enumerate(names)},
            "sampled_token_ids": tokens,
            "spec_token_ids": None,
            "logprobs": None,
            "prompt_logprobs_dict": {},
            "pooler_output": [],
            "kv_connector_output": self.end_pass(plan),
        }
        output = fitted(self.rig.names["scheduler.output"], offered)
        self.rig.measured(lambda: self.scheduler.update_from_output(plan, output), "update_from_output")


def _is_whole(tracked: TrackedRequest) -> bool:
    return bool(tracked.request.num_computed_tokens >= tracked.request.num_tokens)


def _scheduler(rig: Rig, blocks: int, folder: str, transfer: Any) -> Any:
    names = rig.names
    (Path(folder) / "config.json").write_text(json.dumps(MODEL), encoding="utf-8")
    offered = {
        "model": folder,
        "tokenizer": folder,
        "skip_tokenizer_init": True,
        "dtype": "float32",
        "max_model_len": LENGTH,
        "max_num_seqs": RUNNING,
        "max_num_batched_tokens": BUDGET,
        "long_prefill_token_threshold": 0 if rig.subject == LOOKAHEAD else PIECE,
        "enable_chunked_prefill": True,
        "is_encoder_decoder": False,
        "async_scheduling": False,
        "policy": _policy(rig.subject),
        "block_size": BLOCK,
        "enable_prefix_caching": True,
    }
    cache = fitted(names["config.cache"], offered)
    cache.num_gpu_blocks = blocks
    parts = {
        "model_config": fitted(names["config.model"], offered),
        "scheduler_config": fitted(names["config.scheduler"], offered),
        "cache_config": cache,
        "parallel_config": names["config.parallel"](),
        "device_config": names["config.device"]("cpu"),
    }
    if rig.subject == LOOKAHEAD:
        parts["speculative_config"] = names["config.speculation"](
            method="draft_model",
            model=folder,
            num_speculative_tokens=DRAFTS,
            target_model_config=parts["model_config"],
            target_parallel_config=parts["parallel_config"],
        )
    if transfer is not None:
        parts["kv_transfer_config"] = transfer
    config = names["config"](**parts)
    offered = {
        "vllm_config": config,
        "kv_cache_config": cache_config(rig, blocks, has_tensor=transfer is not None),
        "structured_output_manager": names["scheduler.grammars"](config),
        "block_size": BLOCK,
        "hash_block_size": BLOCK,
        "log_stats": False,
    }
    return fitted(names["scheduler"], offered)


def _policy(subject: str) -> str:
    """Subjects of other probes name none."""
    name = subject.partition("-")[0]
    return name if name in POLICIES else POLICIES[0]

"""vLLM, priority policy: blocks of a step that never ran stay cached (vllm #43569, #57580). Exit 1: they are read."""

import tempfile

from transformers import LlamaConfig
from vllm.engine.arg_utils import EngineArgs, current_platform
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

init_none_hash(sha256)
current_platform.device_type, model = "cpu", tempfile.mkdtemp()
shape = dict.fromkeys(("hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads", "vocab_size"), 8)
LlamaConfig(architectures=["LlamaForCausalLM"], **shape).save_pretrained(model)
sizes = {"max_model_len": 64, "block_size": 4, "max_num_batched_tokens": 16, "long_prefill_token_threshold": 8}
config = EngineArgs(model, scheduling_policy="priority", skip_tokenizer_init=True, **sizes).create_engine_config()
layer = FullAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype=config.model_config.dtype)
config.cache_config.num_gpu_blocks, pool = 13, KVCacheConfig(13, [], [KVCacheGroupSpec(["layer"], layer)])
hasher, found, sampling = get_request_block_hasher(4, sha256), False, SamplingParams(max_tokens=4, ignore_eos=True)
for short in (6, 7):  # releases chunk the long prompt differently; one of these needs a block when the long has all
    scheduler, computed = Scheduler(config, pool, StructuredOutputManager(config), block_size=4, hash_block_size=4), {}
    for step in range(8):
        for name, length, rank in [("long", 40, 1), ("short", short, 0)][step : step + 1]:  # the short one ranks higher
            scheduler.add_request(Request(name, [length] * length, sampling, None, priority=rank, block_hasher=hasher))
        plan, sampled = scheduler.schedule(), {}
        for name, count in plan.num_scheduled_tokens.items():
            request, (table,) = scheduler.requests[name], scheduler.kv_cache_manager.get_block_ids(name)
            tokens, end = list(request.all_token_ids), request.num_computed_tokens
            computed.update({(table[at // 4], at % 4): tokens[: at + 1] for at in range(end - count, end)})
            wrong = [at for at in range(end) if computed.get((table[at // 4], at % 4)) != tokens[: at + 1]]
            print(f"short {short}, step {step}: {name} computes {count}, reads {end}; never computed: {wrong}")
            sampled[name], found = [7] if end >= len(tokens) else [], found or bool(wrong)
        at = {name: number for number, name in enumerate(sampled)}
        scheduler.update_from_output(plan, ModelRunnerOutput([*sampled], at, [*sampled.values()]))
raise SystemExit(found)

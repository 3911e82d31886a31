"""vLLM 0.33.0, priority policy: blocks of a step that never ran stay in the prefix cache, and are read as computed."""

# fmt: off
import json
import tempfile

import torch
from vllm.config import CacheConfig, DeviceConfig, ModelConfig, ParallelConfig, SchedulerConfig, VllmConfig
from vllm.sampling_params import SamplingParams
from vllm.utils.hashing import sha256
from vllm.v1.core.kv_cache_utils import get_request_block_hasher, init_none_hash
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec
from vllm.v1.outputs import ModelRunnerOutput
from vllm.v1.request import Request
from vllm.v1.structured_output import StructuredOutputManager

BLOCK, BLOCKS, LENGTH, model = 4, 13, 64, tempfile.mkdtemp()
with open(f"{model}/config.json", "w") as file:
    json.dump(dict(model_type="llama", architectures=["LlamaForCausalLM"], hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1, vocab_size=999, max_position_embeddings=LENGTH), file)
config = VllmConfig(model_config=ModelConfig(model=model, tokenizer=model, skip_tokenizer_init=True, dtype="float32", max_model_len=LENGTH), cache_config=CacheConfig(block_size=BLOCK),
    scheduler_config=SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=16, long_prefill_token_threshold=8, max_model_len=LENGTH, is_encoder_decoder=False, policy="priority", async_scheduling=False), parallel_config=ParallelConfig(), device_config=DeviceConfig("cpu"))
config.cache_config.num_gpu_blocks = BLOCKS
group = KVCacheGroupSpec(["layer"], FullAttentionSpec(block_size=BLOCK, num_kv_heads=1, head_size=1, dtype=torch.float32))
scheduler = Scheduler(vllm_config=config, kv_cache_config=KVCacheConfig(num_blocks=BLOCKS, kv_cache_tensors=[], kv_cache_groups=[group]), structured_output_manager=StructuredOutputManager(config), block_size=BLOCK, hash_block_size=BLOCK)
init_none_hash(sha256)
computed = {}  # block and offset -> the tokens up to there, which its KV depends on
for step in range(8):
    for name, first, count, priority in {0: [("long", 100, 40, 1)], 1: [("short", 200, 7, 0)]}.get(step, []):  # 0 outranks 1
        scheduler.add_request(Request(name, list(range(first, first + count)), SamplingParams(max_tokens=4, ignore_eos=True), None, arrival_time=0.0, priority=priority, block_hasher=get_request_block_hasher(BLOCK, sha256)))
    plan, names, sampled = scheduler.schedule(), [], []
    for name, count in plan.num_scheduled_tokens.items():
        request, (table,) = scheduler.requests[name], scheduler.kv_cache_manager.get_block_ids(name)
        tokens, end = list(request.all_token_ids), request.num_computed_tokens
        computed.update({(table[at // BLOCK], at % BLOCK): tokens[: at + 1] for at in range(end - count, end)})
        wrong = [at for at in range(end) if computed.get((table[at // BLOCK], at % BLOCK)) != tokens[: at + 1]]
        print(f"step {step}: {name} computes {count}, reads {end}" + (f"; NEVER COMPUTED: positions {wrong}" if wrong else ""))
        names, sampled = [*names, name], [*sampled, [7] if end >= len(tokens) else []]
    scheduler.update_from_output(plan, ModelRunnerOutput(req_ids=names, req_id_to_index={name: at for at, name in enumerate(names)}, sampled_token_ids=sampled))

"""Lets SGLang be imported on a CPU without its compiled packages: stand-ins, which raise when they are called.

Imported first by the scripts beside it, which need nothing else but the environment of a release.
"""

import inspect
import os
import sys
import traceback
from array import array
from importlib.machinery import ModuleSpec
from types import ModuleType

import torch

os.environ["TRITON_INTERPRET"] = "1"
NAMES = ("sgl_kernel", "torchvision", "tvm_ffi")
served = set()


class Stub(ModuleType):
    __path__, __version__ = [], "0"

    def __getattr__(self, name):
        if name.startswith("__"):
            raise AttributeError(name)
        return Stub(f"{self.__name__}.{name}")

    def __mro_entries__(self, bases):
        return (object,)

    def __call__(self, *arguments, **named):
        raise RuntimeError(f"{self.__name__} is not here")


class Finder:
    def find_spec(self, name, path=None, target=None):
        package, frame = name.partition(".")[0], sys._getframe(1)
        while "importlib" in frame.f_globals["__name__"]:
            frame = frame.f_back
        if package in NAMES and (package in served or frame.f_globals["__name__"].startswith("sglang")):
            served.add(package)
            return ModuleSpec(name, self, is_package=True)

    def create_module(self, spec):
        return Stub(spec.name)

    def exec_module(self, module):
        pass


def bare(kind, **own):
    """An object made without its start-up, which would want a cluster."""
    made = object.__new__(kind)
    vars(made).update(own)
    return made


def broken(*error):
    """A script that breaks says 2: it could not be tried, and 1 is for the finding alone."""
    traceback.print_exception(*error)
    sys.stderr.flush()
    os._exit(2)


def publish():
    """What newer releases want to know before a pool can be made."""
    from sglang.srt import server_args

    server_args.set_global_server_args_for_scheduler(server_args.ServerArgs(model_path="dummy"))


def prompt(tokens):
    """Tokens in what a request of this release keeps them in."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    is_array = isinstance(Req("", "", [], SamplingParams()).output_ids, array)
    return array("q", tokens) if is_array else list(tokens)


def extend(request, start, end):
    """The request's next chunk: tokens start to end, by what this release calls them."""
    if getattr(request, "kv", request) is None:  # a release that makes this record where it allocates
        from sglang.srt.managers.schedule_batch import ReqKvInfo

        request.kv = ReqKvInfo(kv_allocated_len=end, swa_evicted_seqlen=0)
    if hasattr(request, "set_extend_range"):
        request.set_extend_range(start, end)
    else:
        request.fill_ids, request.fill_len = request.origin_input_ids[:end], end


def metadata_buffers(slots):
    """Buffers of so many slots; newer releases ask for one size more."""
    from sglang.srt.disaggregation.utils import MetadataBuffers

    more = {"max_sampling_mask_tokens": 8} if "mask" in str(inspect.signature(MetadataBuffers)) else {}
    return MetadataBuffers(slots, 32, torch.bfloat16, **more)


def window_tree(slots):
    """A tree over a pool of 64 tokens, so many of them in windows of 8, as a scheduler of such a model makes it.

    The unified tree, where the command line says "unified".
    """
    from sglang.srt.mem_cache import cache_init_params, memory_pool, swa_memory_pool, swa_radix_cache

    sizes = {"size": 64, "size_swa": slots, "page_size": 1, "dtype": torch.bfloat16, "device": "cpu"}
    layers = {"swa_attention_layer_ids": [0], "full_attention_layer_ids": [1]}
    if "enable_kvcache_transpose" in inspect.signature(swa_memory_pool.SWAKVPool).parameters:
        layers["enable_kvcache_transpose"] = False  # older releases ask for it
    pool = swa_memory_pool.SWAKVPool(**sizes, **layers, head_num=2, head_dim=8)
    tokens = swa_radix_cache.SWATokenToKVPoolAllocator(**sizes, kvcache=pool, need_sort=False)
    rows = memory_pool.ReqToTokenPool(size=4, max_context_len=64, device="cpu", enable_memory_saver=False)
    params = cache_init_params.CacheInitParams(False, rows, tokens, page_size=1, sliding_window_size=8)
    if "unified" not in sys.argv:
        return swa_radix_cache.SWARadixCache(params)
    from sglang.srt.mem_cache import unified_cache_components, unified_radix_cache

    kinds = unified_cache_components.ComponentType
    params.tree_components = (kinds.FULL, kinds.SWA)
    return unified_radix_cache.UnifiedRadixCache(params)


sys.meta_path.append(Finder())
sys.excepthook = broken

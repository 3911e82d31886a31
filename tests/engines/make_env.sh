#!/bin/sh
# Make an environment that holds one release of an engine, as far as kvcheck's probes need it on a CPU.
#
#   tests/engines/make_env.sh sglang 0.5.9 DIR [BASE]
#
# BASE: an environment with torch that several releases share; made if it is not there. Default: DIR-base.
# PYTHON: interpreter, 3.11 or newer. TORCH: requirement of torch.
#
# The release's own requirements are left out on purpose: they ask for a CUDA build of torch and for compiled kernels of
# several GB, none of which runs on a CPU. What it imports at load is listed below.
set -eu

if [ $# -lt 3 ]; then
  sed -n '2,6s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ENGINE=$1 VERSION=$2 DIR=$3 BASE=${4:-$3-base}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}

# LIGHT: of the base. OWN: of the engine alone, without what they ask for. LEAVE_OUT: members of its wheel that cannot
# be used without a GPU and are not unpacked.
OWN='' LEAVE_OUT=''
case $ENGINE in
sglang) LIGHT="orjson pyzmq pillow starlette psutil pybase64 requests ipython aiohttp openai partial_json_parser dill
  sentencepiece compressed_tensors gguf msgspec einops prometheus_client fastapi uvloop" ;;
vllm)
  LIGHT="regex psutil requests pyzmq msgspec pillow prometheus_client aiohttp openai einops fastapi uvloop orjson
  partial_json_parser sentencepiece compressed_tensors gguf pybase64"
  OWN="cbor2 openai_harmony cachetools cloudpickle py-cpuinfo xgrammar llguidance blake3 apache-tvm-ffi" LEAVE_OUT='*.so'
  ;;
lmcache)
  LIGHT="msgspec psutil pyzmq aiohttp fastapi safetensors requests prometheus_client pyyaml"
  OWN="aiofile aiofiles caio blake3 cachetools nvtx opentelemetry-sdk opentelemetry-semantic-conventions
  sortedcontainers redis py-cpuinfo numba llvmlite cryptography cffi"
  ;;
*)
  echo "make_env: expected an engine of: sglang, vllm, lmcache; got $ENGINE" >&2
  exit 2
  ;;
esac

# transformers as each release pins it; the newest known pin for a release that is not listed.
case $ENGINE-$VERSION in
sglang-0.5.8 | sglang-0.5.9) TRANSFORMERS=4.57.1 ;;
sglang-0.5.10*) TRANSFORMERS=5.3.0 ;;
sglang-0.5.11) TRANSFORMERS=5.6.0 ;;
sglang-0.5.12 | sglang-0.5.13 | sglang-0.5.14 | sglang-0.5.15) TRANSFORMERS=5.8.1 ;;
*) TRANSFORMERS=5.19.0 ;;
esac

# What was not finished is taken away: it would look like an environment to the next call.
UNFINISHED=''
trap '[ -z "$UNFINISHED" ] || rm -rf "$UNFINISHED"' EXIT
trap 'exit 130' INT TERM

if [ ! -x "$BASE/bin/python" ]; then
  [ -e "$BASE" ] || UNFINISHED=$BASE
  "$PYTHON" -m venv "$BASE"
  # compressed_tensors and others would pull a transformers of their own; each release brings its own.
  "$BASE/bin/python" -m pip install --quiet "$TORCH" numpy triton
  # shellcheck disable=SC2086
  "$BASE/bin/python" -m pip install --quiet $LIGHT
  "$BASE/bin/python" -m pip uninstall --quiet --yes transformers huggingface_hub tokenizers
  UNFINISHED=''
fi
[ -e "$DIR" ] || UNFINISHED=$DIR
"$PYTHON" -m venv "$DIR"
SITE=$("$DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$SITE/base.pth"
"$DIR/bin/python" -m pip install --quiet "transformers==$TRANSFORMERS"
# shellcheck disable=SC2086
[ -z "$OWN" ] || "$DIR/bin/python" -m pip install --quiet --no-deps $OWN
if [ -z "$LEAVE_OUT" ]; then
  "$DIR/bin/python" -m pip install --quiet --no-deps "$ENGINE==$VERSION"
else
  "$DIR/bin/python" -m pip download --quiet --no-deps --dest "$DIR/wheel" "$ENGINE==$VERSION"
  unzip -q "$DIR"/wheel/*.whl -x "$LEAVE_OUT" -d "$SITE"
  rm -r "$DIR/wheel"
fi
"$DIR/bin/python" -c "from importlib.metadata import version; print('$DIR: $ENGINE', version('$ENGINE'))"
UNFINISHED=''

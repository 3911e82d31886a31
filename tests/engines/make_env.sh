#!/bin/sh
# Make an environment that holds one release of an engine, as far as kvcheck's probes need it on a CPU.
#
#   tests/engines/make_env.sh sglang 0.5.9 DIR [BASE]
#
# BASE: an environment with torch that several releases share; made, or given what it lacks. Default: DIR-base.
# PYTHON: interpreter, 3.11 or newer. TORCH: requirement of torch. ALSO: more packages of the release, with what they ask
# for.
#
# The release's own requirements are left out on purpose: they ask for a CUDA build of torch and for compiled kernels of
# several GB, none of which runs on a CPU. What it imports at load is listed below; versions are those that its wheel asks
# for. An environment in which something that the probes look for cannot be imported is not made.
set -eu

if [ $# -lt 3 ]; then
  sed -n '2,8s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ENGINE=$1 VERSION=$2 DIR=$3 BASE=${4:-$3-base}
PYTHON=${PYTHON:-python3}
TORCH=${TORCH:-torch==2.13.0}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)

# LIGHT: of the base. OWN: of the release alone, without what they ask for. FULL: of the release alone, with it.
# LEAVE_OUT: members of its wheel that cannot be used without a GPU and are not unpacked.
OWN='' FULL='transformers' LEAVE_OUT=''
case $ENGINE in
sglang)
  LIGHT="orjson pyzmq pillow starlette psutil pybase64 requests ipython aiohttp openai partial_json_parser dill
  sentencepiece compressed_tensors gguf msgspec einops prometheus_client fastapi uvloop"
  OWN="xgrammar apache-tvm-ffi"
  ;;
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

# What was not finished is taken away: it would look like an environment to the next call.
UNFINISHED=''
WHEEL=$(mktemp -d)
trap 'rm -rf "$WHEEL"; [ -z "$UNFINISHED" ] || rm -rf "$UNFINISHED"' EXIT
trap 'exit 130' INT TERM

# The base remembers what it was given, a requirement a line: another engine's base lacks something.
HAS=$BASE/requirements.txt
if [ ! -x "$BASE/bin/python" ]; then
  [ -e "$BASE" ] || UNFINISHED=$BASE
  "$PYTHON" -m venv "$BASE"
fi
[ -e "$HAS" ] || : >"$HAS"
if grep -q '^torch' "$HAS" && ! grep -qxF "$TORCH" "$HAS"; then
  echo "make_env: $BASE was made with $(grep '^torch' "$HAS"); expected $TORCH; name another BASE" >&2
  exit 1
fi
LACKS=''
for EACH in $TORCH numpy triton $LIGHT; do
  grep -qxF "$EACH" "$HAS" || LACKS="$LACKS $EACH"
done
if [ -n "$LACKS" ]; then
  # shellcheck disable=SC2086
  "$BASE/bin/python" -m pip install --quiet "$TORCH" $LACKS
  # compressed_tensors and others pull a transformers of their own; each release brings its own.
  "$BASE/bin/python" -m pip uninstall --quiet --yes transformers huggingface_hub tokenizers
  for EACH in $LACKS; do echo "$EACH" >>"$HAS"; done
fi
UNFINISHED=''

[ -e "$DIR" ] || UNFINISHED=$DIR
"$PYTHON" -m venv "$DIR"
SITE=$("$DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$BASE/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))' >"$SITE/base.pth"
"$DIR/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$WHEEL" "$ENGINE==$VERSION"
# shellcheck disable=SC2086
"$DIR/bin/python" "$HERE/pins.py" "$WHEEL"/*.whl $FULL ${ALSO:-} >"$WHEEL/full.txt"
"$DIR/bin/python" -m pip install --quiet -r "$WHEEL/full.txt"
# shellcheck disable=SC2086
"$DIR/bin/python" "$HERE/pins.py" "$WHEEL"/*.whl $OWN >"$WHEEL/own.txt"
"$DIR/bin/python" -m pip install --quiet --no-deps -r "$WHEEL/own.txt"
if [ -z "$LEAVE_OUT" ]; then
  "$DIR/bin/python" -m pip install --quiet --no-deps "$WHEEL"/*.whl
else
  unzip -q "$WHEEL"/*.whl -x "$LEAVE_OUT" -d "$SITE"
fi
"$DIR/bin/python" -I "$HERE/imports.py" "$ENGINE"
"$DIR/bin/python" -c "from importlib.metadata import version; print('$DIR: $ENGINE', version('$ENGINE'))"
UNFINISHED=''

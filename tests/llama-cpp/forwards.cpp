// forwards MODEL.gguf THREADS ROWS,.. CONTEXT: measures llama.cpp's forward times in the same way as the
// engine's example `speed`: the fastest of several forwards with CONTEXT tokens in the KV cache. Logits are
// computed for all rows up to ALL_LOGITS rows, and for the last row only above that. Prints one line for each
// number of rows: rows, milliseconds, and milliseconds of CPU time of all threads. Built by build.sh.
#include "llama.h"

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <sstream>
#include <string>
#include <vector>

namespace {

constexpr int ALL_LOGITS = 16;
constexpr double SECONDS_PER_LINE = 0.4;

double now() {
    return std::chrono::duration<double>(std::chrono::steady_clock::now().time_since_epoch()).count();
}

double cpu_seconds() {
    timespec time;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &time);
    return time.tv_sec + time.tv_nsec * 1e-9;
}

void forward(llama_context * context, int first, int rows, int logits, int vocab) {
    llama_batch batch = llama_batch_init(rows, 0, 1);
    batch.n_tokens = rows;
    for (int row = 0; row < rows; row++) {
        batch.token[row] = ((first + row) * 37 + 11) % vocab;
        batch.pos[row] = first + row;
        batch.n_seq_id[row] = 1;
        batch.seq_id[row][0] = 0;
        batch.logits[row] = row >= rows - logits;
    }
    if (llama_decode(context, batch) != 0) {
        std::fprintf(stderr, "a forward of %d rows failed\n", rows);
        std::exit(1);
    }
    llama_batch_free(batch);
    llama_synchronize(context);
}

}  // namespace

int main(int count, char ** args) {
    if (count != 5) {
        std::fprintf(stderr, "usage: forwards MODEL.gguf THREADS ROWS,.. CONTEXT\n");
        return 64;
    }
    llama_log_set([](ggml_log_level level, const char * text, void *) {
        if (level == GGML_LOG_LEVEL_ERROR) std::fputs(text, stderr);
    }, nullptr);
    llama_backend_init();
    llama_model * model = llama_model_load_from_file(args[1], llama_model_default_params());
    if (!model) return 1;
    const int context_tokens = std::atoi(args[4]);
    llama_context_params params = llama_context_default_params();
    params.n_ctx = context_tokens + 1024;
    params.n_batch = params.n_ubatch = 512;
    params.n_threads = params.n_threads_batch = std::atoi(args[2]);
    llama_context * context = llama_init_from_model(model, params);
    if (!context) return 1;
    const int vocab = llama_vocab_n_tokens(llama_model_get_vocab(model));
    for (int at = 0; at < context_tokens; at += 512) {
        forward(context, at, std::min(512, context_tokens - at), 1, vocab);
    }
    std::stringstream list(args[3]);
    for (std::string item; std::getline(list, item, ',');) {
        const int rows = std::atoi(item.c_str());
        const int logits = rows <= ALL_LOGITS ? rows : 1;
        double best = 1e9, best_cpu = 1e9;
        // The first forward of a shape allocates memory, so at least two are run.
        for (double begin = now(), warm = 0; warm < 1 || now() - begin < SECONDS_PER_LINE || warm < 2; warm++) {
            const double start = now(), start_cpu = cpu_seconds();
            forward(context, context_tokens, rows, logits, vocab);
            best = std::min(best, now() - start);
            best_cpu = std::min(best_cpu, cpu_seconds() - start_cpu);
            llama_memory_seq_rm(llama_get_memory(context), 0, context_tokens, -1);
        }
        std::printf("%d %.3f %.3f\n", rows, best * 1e3, best_cpu * 1e3);
    }
}

// CUDA's threads as threads of the host, to run one_shot.cu itself: blocks of a kernel run side by side, ranks
// are processes or threads that share memory. It shows the kernel's arithmetic, indices and order of steps, not
// how a GPU orders its memory.
#include <sched.h>

#include <atomic>
#include <cmath>
#include <cstring>
#include <thread>
#include <vector>

#define ONE_SHOT_PRIMITIVES
#define WARP 1
#define __device__
#define __global__
#define __launch_bounds__(...)

struct Place {
    unsigned x;
};

struct Block {
    explicit Block(unsigned threads) : threads(threads) {}
    const unsigned threads;
    std::atomic<unsigned> arrived{0}, phase{0};
    float values[1024];
};

static thread_local Place threadIdx, blockIdx, blockDim, gridDim;
static thread_local Block* this_block;

static void __syncthreads() {
    const unsigned phase = this_block->phase;
    if (++this_block->arrived == this_block->threads) {
        this_block->arrived = 0;
        this_block->phase = phase + 1;
    } else {
        while (this_block->phase == phase) sched_yield();
    }
}

static unsigned atomicAdd(unsigned* counter, unsigned value) {
    return __atomic_fetch_add(counter, value, __ATOMIC_ACQ_REL);
}

static float rsqrtf(float x) { return 1.0f / std::sqrt(x); }

static void store_release(unsigned long long* flag, unsigned long long value) {
    __atomic_store_n(flag, value, __ATOMIC_RELEASE);
}

static unsigned long long load_acquire(const unsigned long long* flag) {
    sched_yield();
    return __atomic_load_n(flag, __ATOMIC_ACQUIRE);
}

#define load_shared(from) (*(from))

static float from_bits(unsigned bits) {
    float value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static unsigned to_bits(float value) {
    unsigned bits;
    std::memcpy(&bits, &value, sizeof bits);
    return bits;
}

static float from_half(unsigned short bits) {
    _Float16 value;
    std::memcpy(&value, &bits, sizeof value);
    return value;
}

static unsigned short to_half(float value) {
    const _Float16 half = value;
    unsigned short bits;
    std::memcpy(&bits, &half, sizeof bits);
    return bits;
}

static unsigned short to_bfloat(float value) {  // to nearest, ties to even; no NaN here
    const unsigned bits = to_bits(value);
    return (bits + 0x7fffu + (bits >> 16 & 1)) >> 16;
}

static float warp_sum(float value) { return value; }
static float* shared_floats() { return this_block->values; }

// Runs `kernel` on every thread and returns when all are done.
template <typename Kernel>
static void run(unsigned blocks, unsigned threads, Kernel kernel) {
    std::vector<std::thread> all;
    std::vector<Block*> made;
    for (unsigned b = 0; b < blocks; b++) {
        made.push_back(new Block(threads));
        for (unsigned t = 0; t < threads; t++)
            all.emplace_back([=, block = made.back()] {
                threadIdx = {t}, blockIdx = {b}, blockDim = {threads}, gridDim = {blocks};
                this_block = block;
                kernel();
            });
    }
    for (auto& thread : all) thread.join();
    for (auto* block : made) delete block;
}

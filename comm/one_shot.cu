// A sum over the GPUs of a node in one kernel: each rank puts its part where the others can read it, tells
// them, waits until all have, and adds the parts in rank order in fp32. Compiled with -DRANKS=n by NVRTC,
// without headers. After the custom all-reduce of vLLM and TensorRT-LLM's one-shot kernel.
//
// Every rank owns a region that the others have mapped: a State, flags[block][rank], and from DATA on two
// slots. Step n uses slot n & 1. Block b of a rank reads what block b of each rank has written, so flags are
// kept for each block. A flag of step n from any block of a rank tells that its step n - 1 has ended, kernels
// of a rank following each other: so when step n ends here, nobody reads the slot of step n - 1 any more,
// which step n + 1 writes. The sequence number lives in device memory, so a CUDA graph can hold the kernel.

typedef unsigned long long u64;

#define MAX_RANKS 8
#define FLAGS 256
#define DATA 8192

struct alignas(16) Pack {
    unsigned word[4];
};

struct State {
    u64 sequence;   // of the last step that has ended
    unsigned done;  // blocks that are done with the present one
};

#ifndef ONE_SHOT_PRIMITIVES  // a test puts others here
#define WARP 32

__device__ inline void store_release(u64* flag, u64 value) {
    asm volatile("st.release.sys.global.u64 [%0], %1;" ::"l"(flag), "l"(value) : "memory");
}

__device__ inline u64 load_acquire(const u64* flag) {
    u64 value;
    asm volatile("ld.acquire.sys.global.u64 %0, [%1];" : "=l"(value) : "l"(flag) : "memory");
    return value;
}

// Never from a cache that does not see what other GPUs write.
__device__ inline Pack load_shared(const Pack* from) {
    Pack pack;
    asm volatile("ld.volatile.global.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(pack.word[0]), "=r"(pack.word[1]), "=r"(pack.word[2]), "=r"(pack.word[3])
                 : "l"(from)
                 : "memory");
    return pack;
}

__device__ inline float from_half(unsigned short bits) {
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ inline unsigned short to_half(float value) {
    unsigned short bits;
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline unsigned short to_bfloat(float value) {
    unsigned short bits;
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(bits) : "f"(value));
    return bits;
}

__device__ inline float from_bits(unsigned bits) { return __uint_as_float(bits); }
__device__ inline unsigned to_bits(float value) { return __float_as_uint(value); }

__device__ inline float warp_sum(float value) {
    for (int step = WARP / 2; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
    return value;
}

__device__ inline float* shared_floats() {
    __shared__ float values[1024 / WARP];
    return values;
}
#endif

enum Kind { FLOAT32, FLOAT16, BFLOAT16 };

template <Kind KIND>
struct Elements {
    static constexpr int COUNT = KIND == FLOAT32 ? 4 : 8;
    float at[COUNT];
};

template <Kind KIND>
__device__ inline float widen(unsigned short bits) {
    return KIND == FLOAT16 ? from_half(bits) : from_bits((unsigned)bits << 16);
}

template <Kind KIND>
__device__ inline unsigned short narrow(float value) {
    return KIND == FLOAT16 ? to_half(value) : to_bfloat(value);
}

template <Kind KIND>
__device__ inline Elements<KIND> unpack(const Pack& pack) {
    Elements<KIND> elements;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND == FLOAT32) {
            elements.at[i] = from_bits(pack.word[i]);
        } else {
            elements.at[2 * i] = widen<KIND>((unsigned short)(pack.word[i] & 0xffffu));
            elements.at[2 * i + 1] = widen<KIND>((unsigned short)(pack.word[i] >> 16));
        }
    }
    return elements;
}

template <Kind KIND>
__device__ inline Pack pack(const Elements<KIND>& elements) {
    Pack result;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        if constexpr (KIND == FLOAT32) {
            result.word[i] = to_bits(elements.at[i]);
        } else {
            result.word[i] =
                narrow<KIND>(elements.at[2 * i]) | (unsigned)narrow<KIND>(elements.at[2 * i + 1]) << 16;
        }
    }
    return result;
}

struct Regions {
    char* of[MAX_RANKS];

    __device__ u64* flag(int owner, int block, int writer) const {
        return (u64*)(of[owner] + FLAGS) + block * MAX_RANKS + writer;
    }
};

// The next step's number; all blocks read it before the last of them to be done counts it up.
__device__ inline u64 next_step(const State* state) { return *(const volatile u64*)&state->sequence + 1; }

// Returns when this block of every rank is here: what each has written before can be read.
__device__ inline void meet(const Regions& regions, int rank, u64 sequence) {
    __syncthreads();
    if (threadIdx.x < RANKS) {
        store_release(regions.flag(threadIdx.x, blockIdx.x, rank), sequence);
        while (load_acquire(regions.flag(rank, blockIdx.x, threadIdx.x)) < sequence) {
        }
    }
    __syncthreads();
}

__device__ inline void leave(State* state, u64 sequence) {
    if (threadIdx.x == 0 && atomicAdd(&state->done, 1u) == gridDim.x - 1) {
        state->done = 0;
        state->sequence = sequence;
    }
}

// The sum of all ranks' packs at `offset` of their regions, in rank order, rounded once.
template <Kind KIND>
__device__ inline Elements<KIND> sum(const Regions& regions, u64 offset) {
    Pack parts[RANKS];
#pragma unroll
    for (int r = 0; r < RANKS; r++) parts[r] = load_shared((const Pack*)(regions.of[r] + offset));
    Elements<KIND> total = unpack<KIND>(parts[0]);
#pragma unroll
    for (int r = 1; r < RANKS; r++) {
        const Elements<KIND> part = unpack<KIND>(parts[r]);
#pragma unroll
        for (int i = 0; i < total.COUNT; i++) total.at[i] += part.at[i];
    }
    return unpack<KIND>(pack<KIND>(total));
}

// x: `packs` packs, replaced by their sums.
template <Kind KIND>
__device__ void all_reduce(const Regions& regions, int rank, u64 slot_bytes, Pack* x, int packs) {
    State* state = (State*)regions.of[rank];
    const u64 sequence = next_step(state);
    const u64 slot = DATA + (sequence & 1) * slot_bytes;
    const int first = blockIdx.x * blockDim.x + threadIdx.x, stride = gridDim.x * blockDim.x;
    Pack* mine = (Pack*)(regions.of[rank] + slot);
    for (int i = first; i < packs; i += stride) mine[i] = x[i];
    meet(regions, rank, sequence);
    for (int i = first; i < packs; i += stride)
        x[i] = pack<KIND>(sum<KIND>(regions, slot + i * sizeof(Pack)));
    leave(state, sequence);
}

// residual += sum of partial; normed = RMSNorm(residual) * weight, rounded where the plain layers round.
template <Kind KIND>
__device__ void all_reduce_norm(const Regions& regions, int rank, u64 slot_bytes, const Pack* partial,
                                Pack* residual, const Pack* weight, Pack* normed, int rows, int packs,
                                float eps) {
    constexpr int COUNT = Elements<KIND>::COUNT;
    State* state = (State*)regions.of[rank];
    const u64 sequence = next_step(state);
    const u64 slot = DATA + (sequence & 1) * slot_bytes;
    Pack* mine = (Pack*)(regions.of[rank] + slot);
    for (int row = blockIdx.x; row < rows; row += gridDim.x)
        for (int i = threadIdx.x; i < packs; i += blockDim.x) mine[row * packs + i] = partial[row * packs + i];
    meet(regions, rank, sequence);
    float* const parts = shared_floats();
    for (int row = blockIdx.x; row < rows; row += gridDim.x) {
        float squares = 0.0f;
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            const int at = row * packs + i;
            Elements<KIND> x = sum<KIND>(regions, slot + at * sizeof(Pack));
            const Elements<KIND> before = unpack<KIND>(residual[at]);
#pragma unroll
            for (int j = 0; j < COUNT; j++) x.at[j] += before.at[j];
            const Pack after = pack<KIND>(x);
            residual[at] = after;
            x = unpack<KIND>(after);
#pragma unroll
            for (int j = 0; j < COUNT; j++) squares += x.at[j] * x.at[j];
        }
        squares = warp_sum(squares);
        __syncthreads();  // the last row's parts have been read
        if (threadIdx.x % WARP == 0) parts[threadIdx.x / WARP] = squares;
        __syncthreads();
        float total = 0.0f;
        for (int i = 0; i < blockDim.x / WARP; i++) total += parts[i];
        const float scale = rsqrtf(total / (float)(packs * COUNT) + eps);
        for (int i = threadIdx.x; i < packs; i += blockDim.x) {
            Elements<KIND> x = unpack<KIND>(residual[row * packs + i]);
            const Elements<KIND> w = unpack<KIND>(weight[i]);
#pragma unroll
            for (int j = 0; j < COUNT; j++) x.at[j] *= scale;
            x = unpack<KIND>(pack<KIND>(x));
#pragma unroll
            for (int j = 0; j < COUNT; j++) x.at[j] *= w.at[j];
            normed[row * packs + i] = pack<KIND>(x);
        }
    }
    leave(state, sequence);
}

#define REGIONS char *r0, char *r1, char *r2, char *r3, char *r4, char *r5, char *r6, char *r7
#define GATHERED Regions{{r0, r1, r2, r3, r4, r5, r6, r7}}
// One block a multiprocessor will do: with registers for all of them, the loads of a sum are under way at once.
#define ENTRY extern "C" __global__ void __launch_bounds__(1024, 1)
#define KERNELS(KIND, NAME)                                                                               \
    ENTRY all_reduce_##NAME(REGIONS, int rank, u64 slot_bytes, Pack* x, int packs) {                      \
        all_reduce<KIND>(GATHERED, rank, slot_bytes, x, packs);                                           \
    }                                                                                                     \
    ENTRY all_reduce_norm_##NAME(REGIONS, int rank, u64 slot_bytes, const Pack* partial, Pack* residual,  \
                                 const Pack* weight, Pack* normed, int rows, int packs, float eps) {      \
        all_reduce_norm<KIND>(GATHERED, rank, slot_bytes, partial, residual, weight, normed, rows, packs, \
                              eps);                                                                       \
    }

KERNELS(FLOAT32, float32)
KERNELS(FLOAT16, float16)
KERNELS(BFLOAT16, bfloat16)

/* Rows of a step on a CPU with AVX2: int8 products and the operations around them. `native.py` describes the
 * functions. Addresses are those of contiguous tensors.
 *
 * Sums of codes are exact integers, so the instructions that compute them do not change a result. Every row is computed
 * alone and in one order: its result depends neither on the other rows nor on the number of threads.
 */
#define PY_SSIZE_T_CLEAN
#define Py_LIMITED_API 0x030b0000
#include <Python.h>

#if defined(__x86_64__) && defined(__linux__) && defined(__GNUC__)
#include <immintrin.h>
#include <linux/futex.h>
#include <math.h>
#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#define AVX2 __attribute__((target("avx2,fma")))
#define INLINE static inline __attribute__((always_inline))
#define LOAD256(p) _mm256_loadu_si256((const __m256i *)(p))
#define LOAD512(p) _mm512_loadu_si512((const void *)(p))
typedef __m256 f8;

/* --- threads: workers take pieces of a job while the caller does, so a late worker delays nothing ----------------- */
enum { MAX_WORKERS = 63, SPIN_ROUNDS = 60, PAUSES = 32, MIN_SHARED = 1 << 14, MIN_WAKING = 1 << 19 };
/* Costs in products of codes: of work on one number of a row, and of reading a code. */
enum { ROW_COST = 16, READ_COST = 4 };
typedef void (*Work)(const void *job, int64_t first, int64_t last);

static struct {
    pthread_mutex_t turn;
    atomic_uint round; /* odd while a job is open */
    atomic_int sleeping, inside;
    atomic_llong next;
    int64_t count;
    Work work;
    const void *job;
    int workers;
} pool = {.turn = PTHREAD_MUTEX_INITIALIZER};

static void take_pieces(void) {
    int64_t piece;
    while ((piece = atomic_fetch_add(&pool.next, 1)) < pool.count) pool.work(pool.job, piece, piece + 1);
}

static void *serve(void *unused) {
    for (;;) {
        unsigned seen;
        for (int i = 0; !((seen = atomic_load(&pool.round)) & 1); i++) {
            if (i < SPIN_ROUNDS) {
                for (int j = 0; j < PAUSES && !(atomic_load(&pool.round) & 1); j++) _mm_pause();
                sched_yield(); /* another program may need this core */
            } else {
                atomic_fetch_add(&pool.sleeping, 1);
                syscall(SYS_futex, &pool.round, FUTEX_WAIT_PRIVATE, seen, NULL, NULL, 0);
                atomic_fetch_sub(&pool.sleeping, 1);
                i = 0;
            }
        }
        atomic_fetch_add(&pool.inside, 1);
        if (atomic_load(&pool.round) & 1) take_pieces();
        atomic_fetch_sub(&pool.inside, 1);
        for (int i = 0; atomic_load(&pool.round) == seen; i++) {
            if (i < 4 * PAUSES) _mm_pause();
            else sched_yield();
        }
    }
    return unused;
}

static void forget_workers(void) { /* in a forked child */
    memset(&pool, 0, sizeof pool);
    pthread_mutex_init(&pool.turn, NULL);
}

static void start_workers(int wanted) {
    for (; pool.workers < wanted && pool.workers < MAX_WORKERS; pool.workers++) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, serve, NULL)) return;
        pthread_detach(thread);
    }
}

/* Do work(job, first, last) for parts of [0, count). cost: products, which decide whether sleeping workers are worth
 * starting. A caller that finds the workers taken does all of it. */
static void share(Work work, const void *job, int64_t count, int64_t threads, int64_t cost) {
    if (threads <= 1 || count <= 1 || cost < MIN_SHARED || pthread_mutex_trylock(&pool.turn)) {
        work(job, 0, count);
        return;
    }
    start_workers((int)threads - 1);
    if (cost < MIN_WAKING && atomic_load(&pool.sleeping) >= pool.workers) {
        pthread_mutex_unlock(&pool.turn);
        work(job, 0, count);
        return;
    }
    pool.work = work, pool.job = job, pool.count = count;
    atomic_store(&pool.next, 0);
    atomic_fetch_add(&pool.round, 1);
    if (atomic_load(&pool.sleeping)) syscall(SYS_futex, &pool.round, FUTEX_WAKE_PRIVATE, MAX_WORKERS, NULL, NULL, 0);
    take_pieces();
    atomic_fetch_add(&pool.round, 1);
    while (atomic_load(&pool.inside)) _mm_pause();
    pthread_mutex_unlock(&pool.turn);
}

/* --- vectors ------------------------------------------------------------------------------------------------------ */
AVX2 INLINE float sum_of(f8 x) {
    __m128 s = _mm_add_ps(_mm256_castps256_ps128(x), _mm256_extractf128_ps(x, 1));
    s = _mm_add_ps(s, _mm_movehl_ps(s, s));
    return _mm_cvtss_f32(_mm_add_ss(s, _mm_movehdup_ps(s)));
}

/* e^x to about 2 units in the last place; NaN stays. */
AVX2 INLINE f8 exp_of(f8 x) {
    x = _mm256_min_ps(_mm256_set1_ps(88.0f), _mm256_max_ps(_mm256_set1_ps(-87.0f), x));
    f8 n = _mm256_mul_ps(x, _mm256_set1_ps(1.44269504f));
    n = _mm256_round_ps(n, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    f8 r = _mm256_fnmadd_ps(n, _mm256_set1_ps(0.693359375f), x);
    r = _mm256_fnmadd_ps(n, _mm256_set1_ps(-2.12194440e-4f), r);
    f8 y = _mm256_set1_ps(1.0f / 5040);
    const float terms[] = {1.0f / 720, 1.0f / 120, 1.0f / 24, 1.0f / 6, 0.5f, 1.0f, 1.0f};
    for (int i = 0; i < 7; i++) y = _mm256_fmadd_ps(y, r, _mm256_set1_ps(terms[i]));
    __m256i power = _mm256_slli_epi32(_mm256_add_epi32(_mm256_cvtps_epi32(n), _mm256_set1_epi32(127)), 23);
    return _mm256_mul_ps(y, _mm256_castsi256_ps(power));
}

/* --- before a product: norm, rotation, rounding ------------------------------------------------------------------- */
typedef struct {
    const float *x, *norm_weight, *norm_bias;
    float eps;
    int64_t width, block; /* block: of the rotation, 1 for none */
    float max_code;
    uint8_t *codes;
    float *largest;
    atomic_int *failed; /* 1 as soon as a row finds no memory */
} Before;

AVX2 INLINE void normalise(const Before *job, const float *x, float *y) {
    int64_t width = job->width;
    f8 sum = _mm256_setzero_ps(), squares = _mm256_setzero_ps();
    float mean = 0;
    if (job->norm_bias) {
        for (int64_t i = 0; i < width; i += 8) sum = _mm256_add_ps(sum, _mm256_loadu_ps(x + i));
        mean = sum_of(sum) / (float)width;
    }
    f8 centre = _mm256_set1_ps(mean);
    for (int64_t i = 0; i < width; i += 8) {
        f8 d = _mm256_sub_ps(_mm256_loadu_ps(x + i), centre);
        squares = _mm256_fmadd_ps(d, d, squares);
    }
    f8 scale = _mm256_set1_ps(1.0f / sqrtf(sum_of(squares) / (float)width + job->eps));
    for (int64_t i = 0; i < width; i += 8) {
        f8 d = _mm256_mul_ps(_mm256_sub_ps(_mm256_loadu_ps(x + i), centre), scale);
        f8 offset = job->norm_bias ? _mm256_loadu_ps(job->norm_bias + i) : _mm256_setzero_ps();
        _mm256_storeu_ps(y + i, _mm256_fmadd_ps(d, _mm256_loadu_ps(job->norm_weight + i), offset));
    }
}

/* Multiply `size` numbers (8 or more, a power of two) by Sylvester's matrix of 1 and -1. */
AVX2 INLINE void rotate(float *x, int64_t size) {
    const f8 odd = _mm256_setr_ps(0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f, 0.0f, -0.0f);
    const f8 second = _mm256_setr_ps(0.0f, 0.0f, -0.0f, -0.0f, 0.0f, 0.0f, -0.0f, -0.0f);
    const f8 upper = _mm256_setr_ps(0.0f, 0.0f, 0.0f, 0.0f, -0.0f, -0.0f, -0.0f, -0.0f);
    for (int64_t i = 0; i < size; i += 8) {
        f8 v = _mm256_loadu_ps(x + i);
        v = _mm256_add_ps(_mm256_permute_ps(v, 0xb1), _mm256_xor_ps(v, odd));
        v = _mm256_add_ps(_mm256_permute_ps(v, 0x4e), _mm256_xor_ps(v, second));
        _mm256_storeu_ps(x + i, _mm256_add_ps(_mm256_permute2f128_ps(v, v, 1), _mm256_xor_ps(v, upper)));
    }
    for (int64_t half = 8; half < size; half *= 2)
        for (int64_t start = 0; start < size; start += 2 * half)
            for (int64_t i = start; i < start + half; i += 8) {
                f8 a = _mm256_loadu_ps(x + i), b = _mm256_loadu_ps(x + i + half);
                _mm256_storeu_ps(x + i, _mm256_add_ps(a, b));
                _mm256_storeu_ps(x + i + half, _mm256_sub_ps(a, b));
            }
}

AVX2 static void before(const void *arg, int64_t first, int64_t last) {
    const Before *job = arg;
    int64_t width = job->width;
    float *y = malloc(sizeof(float) * width);
    if (!y) {
        atomic_store(job->failed, 1);
        return;
    }
    const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
    /* As FBGEMM rounds: x / largest * steps + shift in one fused operation, to the nearest integer, ties to even. */
    f8 steps = _mm256_set1_ps(1.0f / (float)(1.0 / job->max_code)), shift = _mm256_set1_ps(job->max_code + 1);
    for (int64_t row = first; row < last; row++) {
        const float *x = job->x + row * width;
        if (job->norm_weight) normalise(job, x, y);
        else memcpy(y, x, sizeof(float) * width);
        __m256i most = _mm256_setzero_si256(); /* NaN is the largest integer, and stays */
        for (int64_t i = 0; i < width; i += job->block > 1 ? job->block : width) {
            int64_t size = job->block > 1 ? job->block : width;
            if (job->block > 1) rotate(y + i, size);
            for (int64_t j = i; j < i + size; j += 8)
                most = _mm256_max_epi32(most, _mm256_and_si256(LOAD256(y + j), magnitude));
        }
        __m128i half = _mm_max_epi32(_mm256_castsi256_si128(most), _mm256_extracti128_si256(most, 1));
        half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0x4e));
        half = _mm_max_epi32(half, _mm_shuffle_epi32(half, 0xb1));
        float largest = _mm_cvtss_f32(_mm_castsi128_ps(half));
        job->largest[row] = largest;
        f8 divisor = _mm256_set1_ps(largest);
        for (int64_t i = 0; i < width; i += 32) {
            __m256i part[4];
            for (int j = 0; j < 4; j++) {
                f8 v = _mm256_div_ps(_mm256_loadu_ps(y + i + 8 * j), divisor);
                part[j] = _mm256_cvtps_epi32(_mm256_fmadd_ps(v, steps, shift));
                part[j] = _mm256_and_si256(part[j], _mm256_set1_epi32(255));
            }
            part[0] = _mm256_packus_epi32(part[0], part[1]);
            part[2] = _mm256_packus_epi32(part[2], part[3]);
            __m256i bytes = _mm256_packus_epi16(part[0], part[2]);
            bytes = _mm256_permutevar8x32_epi32(bytes, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7));
            _mm256_storeu_si256((__m256i *)(job->codes + row * width + i), bytes);
        }
    }
    free(y);
}

/* Return 0 if there was too little memory. */
static int prepare_rows(Before *job, int64_t rows, int64_t threads) {
    atomic_int failed = 0;
    job->failed = &failed;
    share(before, job, rows, threads, rows * job->width * ROW_COST);
    return !failed;
}

/* --- after a product: scale of the row, bias, activation, residual ------------------------------------------------ */
enum { PLAIN, GELU_TANH, SILU };
typedef struct {
    const float *y; /* [rows, outs]: sums times the weight's scales */
    int64_t outs;
    const float *largest, *bias, *residual;
    float *out;
    int activation;
} After;

AVX2 INLINE f8 activated(f8 x, int activation) {
    if (activation == PLAIN) return x;
    f8 z = x;
    if (activation == GELU_TANH) {
        f8 linear = _mm256_set1_ps(1.59576912f);
        z = _mm256_mul_ps(x, _mm256_fmadd_ps(_mm256_set1_ps(0.0713548163f), _mm256_mul_ps(x, x), linear));
    }
    f8 one = _mm256_set1_ps(1.0f);
    return _mm256_div_ps(x, _mm256_add_ps(one, exp_of(_mm256_sub_ps(_mm256_setzero_ps(), z))));
}

/* The first `count` of 8 numbers, which the array may end with. */
AVX2 INLINE f8 load(const float *x, int64_t count) {
    if (count >= 8) return _mm256_loadu_ps(x);
    float some[8] = {0};
    memcpy(some, x, sizeof(float) * count);
    return _mm256_loadu_ps(some);
}

/* Outputs [first, last) of one row. y: where its sums of `first` are. */
AVX2 INLINE void after_row(const After *job, int64_t row, const float *y, int64_t first, int64_t last) {
    f8 largest = _mm256_set1_ps(job->largest ? job->largest[row] : 1.0f);
    for (int64_t i = first; i < last; i += 8) {
        int64_t left = last - i, at = row * job->outs + i;
        f8 value = _mm256_mul_ps(load(y + i - first, left), largest);
        if (job->bias) value = _mm256_add_ps(value, load(job->bias + i, left));
        value = activated(value, job->activation);
        if (job->residual) value = _mm256_add_ps(value, load(job->residual + at, left));
        if (left >= 8) {
            _mm256_storeu_ps(job->out + at, value);
            continue;
        }
        float some[8];
        _mm256_storeu_ps(some, value);
        memcpy(job->out + at, some, sizeof(float) * left);
    }
}

AVX2 static void after(const void *arg, int64_t first, int64_t last) {
    const After *job = arg;
    for (int64_t row = first; row < last; row++) after_row(job, row, job->y + row * job->outs, 0, job->outs);
}

/* --- products of codes -------------------------------------------------------------------------------------------- */
enum { OUTS = 4, COLUMNS = 64, PIECE = 32 }; /* PIECE: outputs of a worker at once */
typedef struct {
    int64_t outs, width, block;
    float max_code;
    const int8_t *codes;   /* [outs / OUTS, width / COLUMNS, OUTS, COLUMNS], outs rounded up */
    const float *scales;   /* [outs]: of sums, for inputs up to 1 */
    const int32_t *shifts; /* [outs]: what the shift of inputs adds to each sum */
    const float *bias;
    int activation;
    int64_t threads;
} Weight;

typedef struct {
    const Weight *weight;
    const uint8_t *codes;
    int64_t rows;
    After after;
} Product;

typedef void (*Sums)(const uint8_t *x, int64_t rows, const int8_t *w, int64_t width, int64_t outs, int32_t *sums);

AVX2 INLINE __m256i multiply_avx2(__m256i sum, __m256i x, __m256i w) {
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(x, w), _mm256_set1_epi16(1)));
}
AVX2 INLINE void totals_avx2(const __m256i *x, int32_t *sums) {
    __m256i pairs = _mm256_hadd_epi32(_mm256_hadd_epi32(x[0], x[1]), _mm256_hadd_epi32(x[2], x[3]));
    __m128i all = _mm_add_epi32(_mm256_castsi256_si128(pairs), _mm256_extracti128_si256(pairs, 1));
    _mm_storeu_si128((__m128i *)sums, all);
}

/* sums[row * PIECE + out] = x[row] . w[out], in tiles of a few rows and OUTS outputs whose sums stay in registers. */
#define DEFINE_SUMS(NAME, TARGET, VECTOR, BYTES, LOAD, ZERO, MULTIPLY, TOTALS, ROWS)                                   \
    __attribute__((target(TARGET))) INLINE void tile_##NAME(const uint8_t *x, const int rows, const int8_t *w,         \
                                                            int64_t width, int32_t *sums) {                            \
        VECTOR sum[4][OUTS];                                                                                           \
        for (int r = 0; r < rows; r++)                                                                                 \
            for (int o = 0; o < OUTS; o++) sum[r][o] = ZERO();                                                         \
        for (int64_t i = 0; i < width; i += COLUMNS, w += OUTS * COLUMNS)                                              \
            for (int o = 0; o < OUTS; o++)                                                                             \
                for (int j = 0; j < COLUMNS; j += BYTES) {                                                             \
                    VECTOR part = LOAD(w + o * COLUMNS + j);                                                           \
                    for (int r = 0; r < rows; r++)                                                                     \
                        sum[r][o] = MULTIPLY(sum[r][o], LOAD(x + r * width + i + j), part);                            \
                }                                                                                                      \
        for (int r = 0; r < rows; r++) TOTALS(sum[r], sums + r * PIECE);                                               \
    }                                                                                                                  \
    __attribute__((target(TARGET))) static void sums_##NAME(const uint8_t *x, int64_t rows, const int8_t *w,           \
                                                            int64_t width, int64_t outs, int32_t *sums) {              \
        for (int64_t o = 0; o < outs; o += OUTS)                                                                       \
            for (int64_t r = 0; r < rows;) {                                                                           \
                const uint8_t *from = x + r * width;                                                                   \
                int32_t *to = sums + r * PIECE + o;                                                                    \
                if (rows - r >= ROWS) tile_##NAME(from, ROWS, w + o * width, width, to), r += ROWS;                    \
                else tile_##NAME(from, 1, w + o * width, width, to), r++;                                              \
            }                                                                                                          \
    }

DEFINE_SUMS(avx2, "avx2,fma", __m256i, 32, LOAD256, _mm256_setzero_si256, multiply_avx2, totals_avx2, 2)
#define DPBUSD512(sum, x, w) _mm512_dpbusd_epi32(sum, x, w)
__attribute__((target("avx512f,avx2,fma"))) INLINE void totals_avx512(const __m512i *x, int32_t *sums) {
    __m256i half[OUTS];
    for (int o = 0; o < OUTS; o++)
        half[o] = _mm256_add_epi32(_mm512_castsi512_si256(x[o]), _mm512_extracti64x4_epi64(x[o], 1));
    totals_avx2(half, sums);
}
DEFINE_SUMS(avx512, "avx512f,avx512bw,avx512vnni,avx2,fma", __m512i, 64, LOAD512, _mm512_setzero_si512, DPBUSD512,
            totals_avx512, 4)
#if __GNUC__ >= 11 && !defined(__clang__)
#define DPBUSD256(sum, x, w) _mm256_dpbusd_avx_epi32(sum, x, w)
DEFINE_SUMS(avxvnni, "avx2,fma,avxvnni", __m256i, 32, LOAD256, _mm256_setzero_si256, DPBUSD256, totals_avx2, 2)
#endif

static Sums sums_of;

enum { ROWS_AT_ONCE = 32 };

/* Pieces [first, last) of PIECE outputs each, of all rows. */
AVX2 static void multiply(const void *arg, int64_t first, int64_t last) {
    const Product *job = arg;
    const Weight *weight = job->weight;
    int32_t sums[ROWS_AT_ONCE * PIECE];
    float y[ROWS_AT_ONCE * PIECE];
    for (int64_t start = first * PIECE; start < last * PIECE && start < weight->outs; start += PIECE) {
        int64_t count = weight->outs - start < PIECE ? weight->outs - start : PIECE;
        for (int64_t row = 0; row < job->rows; row += ROWS_AT_ONCE) {
            int64_t rows = job->rows - row < ROWS_AT_ONCE ? job->rows - row : ROWS_AT_ONCE;
            const uint8_t *x = job->codes + row * weight->width;
            sums_of(x, rows, weight->codes + start * weight->width, weight->width, count, sums);
            for (int64_t r = 0; r < rows; r++) {
                for (int64_t o = 0; o < count; o++) {
                    int32_t sum = sums[r * PIECE + o] - weight->shifts[start + o];
                    y[r * PIECE + o] = (float)sum * weight->scales[start + o];
                }
                after_row(&job->after, row + r, y + r * PIECE, start, start + count);
            }
        }
    }
}

/* --- Python ------------------------------------------------------------------------------------------------------- */
static int read_numbers(PyObject *const *args, Py_ssize_t given, Py_ssize_t wanted, int64_t *numbers) {
    if (given != wanted) {
        PyErr_Format(PyExc_TypeError, "expected %zd arguments, got %zd", wanted, given);
        return 0;
    }
    for (Py_ssize_t i = 0; i < given; i++) {
        if (PyFloat_Check(args[i])) { /* its bits: see as_float */
            double value = PyFloat_AsDouble(args[i]);
            memcpy(numbers + i, &value, sizeof value);
        } else if ((numbers[i] = PyLong_AsLongLong(args[i])) == -1 && PyErr_Occurred()) {
            return 0;
        }
    }
    return 1;
}

static float as_float(int64_t number) {
    double value;
    memcpy(&value, &number, sizeof value);
    return (float)value;
}

#define POINTER(i) ((void *)(intptr_t)n[i])

static void free_weight(PyObject *capsule) { free(PyCapsule_GetPointer(capsule, "weight")); }

static PyObject *new_weight(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[10];
    (void)self;
    if (!read_numbers(args, given, 10, n)) return NULL;
    Weight *weight = malloc(sizeof *weight);
    if (!weight) return PyErr_NoMemory();
    *weight = (Weight){.outs = n[0], .width = n[1], .block = n[2], .max_code = (float)n[3], .codes = POINTER(4),
                       .scales = POINTER(5), .shifts = POINTER(6), .bias = POINTER(7), .activation = (int)n[8],
                       .threads = n[9]};
    return PyCapsule_New(weight, "weight", free_weight);
}

static PyObject *linear(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[7];
    (void)self;
    if (given != 8) return PyErr_Format(PyExc_TypeError, "expected 8 arguments, got %zd", given);
    const Weight *weight = PyCapsule_GetPointer(args[0], "weight");
    if (!weight || !read_numbers(args + 1, given - 1, 7, n)) return NULL;
    int64_t rows = n[0];
    uint8_t *codes = malloc(rows * weight->width + rows * sizeof(float) + 1);
    if (!codes) return PyErr_NoMemory();
    float *largest = (float *)(codes + rows * weight->width);
    Before prepared = {.x = POINTER(1), .norm_weight = POINTER(4), .norm_bias = POINTER(5), .eps = as_float(n[6]),
                       .width = weight->width, .block = weight->block, .max_code = weight->max_code, .codes = codes,
                       .largest = largest};
    Product product = {.weight = weight, .codes = codes, .rows = rows,
                       .after = {.outs = weight->outs, .largest = largest, .bias = weight->bias, .residual = POINTER(2),
                                 .out = POINTER(3), .activation = weight->activation}};
    int64_t cost = (rows + READ_COST) * weight->outs * weight->width;
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = prepare_rows(&prepared, rows, weight->threads);
    if (done) share(multiply, &product, (weight->outs + PIECE - 1) / PIECE, weight->threads, cost);
    Py_END_ALLOW_THREADS
    free(codes);
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *prepare(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[11];
    (void)self;
    if (!read_numbers(args, given, 11, n)) return NULL;
    Before job = {.x = POINTER(0), .width = n[2], .block = n[3], .norm_weight = POINTER(4), .norm_bias = POINTER(5),
                  .eps = as_float(n[6]), .max_code = (float)n[7], .codes = POINTER(8), .largest = POINTER(9)};
    int done;
    Py_BEGIN_ALLOW_THREADS
    done = prepare_rows(&job, n[1], n[10]);
    Py_END_ALLOW_THREADS
    if (!done) return PyErr_NoMemory();
    Py_RETURN_NONE;
}

static PyObject *finish(PyObject *self, PyObject *const *args, Py_ssize_t given) {
    int64_t n[9];
    (void)self;
    if (!read_numbers(args, given, 9, n)) return NULL;
    After job = {.y = POINTER(0), .outs = n[2], .largest = POINTER(3), .bias = POINTER(4), .activation = (int)n[5],
                 .residual = POINTER(6), .out = POINTER(7)};
    Py_BEGIN_ALLOW_THREADS
    share(after, &job, n[1], n[8], n[1] * n[2] * ROW_COST);
    Py_END_ALLOW_THREADS
    Py_RETURN_NONE;
}

static const char *const ways[] = {"AVX-512 VNNI", "AVX-VNNI", "AVX2"}; /* the fastest first */

/* Return the sums by these instructions, NULL if this CPU lacks them. */
static Sums sums_by(const char *way) {
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma")) return NULL;
    if (!strcmp(way, "AVX2")) return sums_avx2;
    if (!strcmp(way, "AVX-512 VNNI") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vnni"))
        return sums_avx512;
#if __GNUC__ >= 11 && !defined(__clang__)
    if (!strcmp(way, "AVX-VNNI") && __builtin_cpu_supports("avxvnni")) return sums_avxvnni;
#endif
    return NULL;
}

static const char *choose_sums(void) {
    for (size_t i = 0; i < sizeof ways / sizeof *ways; i++)
        if ((sums_of = sums_by(ways[i]))) return ways[i];
    return NULL;
}

static PyObject *use(PyObject *self, PyObject *name) {
    (void)self;
    const char *way = PyUnicode_AsUTF8AndSize(name, NULL);
    Sums sums = way ? sums_by(way) : NULL;
    if (sums) sums_of = sums;
    return way ? PyBool_FromLong(sums != NULL) : NULL;
}

static PyMethodDef functions[] = {
    {"weight", (PyCFunction)(void (*)(void))new_weight, METH_FASTCALL, NULL},
    {"linear", (PyCFunction)(void (*)(void))linear, METH_FASTCALL, NULL},
    {"prepare", (PyCFunction)(void (*)(void))prepare, METH_FASTCALL, NULL},
    {"finish", (PyCFunction)(void (*)(void))finish, METH_FASTCALL, NULL},
    {"use", use, METH_O, NULL},
    {NULL, NULL, 0, NULL},
};
#else
static PyMethodDef functions[] = {{NULL, NULL, 0, NULL}};
static const char *choose_sums(void) { return NULL; }
static void forget_workers(void) {}
#define pthread_atfork(before, parent, child) (void)(child)
#endif

static struct PyModuleDef module = {PyModuleDef_HEAD_INIT, .m_name = "_rows", .m_size = -1, .m_methods = functions};

PyMODINIT_FUNC PyInit__rows(void) {
    const char *instructions = choose_sums();
    if (!instructions) {
        PyErr_SetString(PyExc_ImportError, "the CPU lacks AVX2");
        return NULL;
    }
    pthread_atfork(NULL, NULL, forget_workers);
    PyObject *made = PyModule_Create(&module);
    if (made && PyModule_AddStringConstant(made, "INSTRUCTIONS", instructions)) return NULL;
    if (made && PyModule_AddIntConstant(made, "INTERFACE_VERSION", 4)) return NULL; /* of arguments: see native.py */
    return made;
}

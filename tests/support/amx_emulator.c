/* Runs the AMX instructions of the CPU kernels on an x86-64 Linux machine whose processor has none.
 *
 *     gcc -O3 -march=native -shared -fPIC -o amx_emulator.so amx_emulator.c -lm -ldl
 *     LD_PRELOAD=./amx_emulator.so NUMBA_CPU_FEATURES=... python ...
 *
 * A processor without AMX answers such an instruction with SIGILL. The handler decodes it, does what Intel's Software Developer's Manual
 * (volume 2) says of it, and goes on behind it. So the very code that runs on a processor with AMX is tested, but a thousand times slower.
 * The manual's limits are checked: a tile that is not configured, or shapes that do not fit, end the process.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ucontext.h>
#include <unistd.h>

enum { TILES = 8, MAX_ROWS = 16, MAX_BYTES = 64 };

static __thread __attribute__((tls_model("initial-exec"))) struct {
    int configured;
    int rows[TILES], bytes[TILES];
    uint8_t data[TILES][MAX_ROWS][MAX_BYTES];
} state;

static void fail(const char *why) {
    dprintf(2, "AMX emulator: %s\n", why);
    abort();
}

static uint64_t read_register(const ucontext_t *context, int number) {
    static const int order[16] = {REG_RAX, REG_RCX, REG_RDX, REG_RBX, REG_RSP, REG_RBP, REG_RSI, REG_RDI,
                                  REG_R8,  REG_R9,  REG_R10, REG_R11, REG_R12, REG_R13, REG_R14, REG_R15};
    return (uint64_t)context->uc_mcontext.gregs[order[number]];
}

/* The memory operand behind a ModRM byte. */
struct operand {
    uint64_t start; /* base and displacement, and for a simple operand the scaled index */
    uint64_t stride; /* the scaled index: the distance of two rows of a tile */
    const uint8_t *end;
};

static struct operand read_operand(const ucontext_t *context, const uint8_t *modrm, int base_bit, int index_bit) {
    struct operand operand = {0, 0, modrm + 1};
    int mode = *modrm >> 6, base = *modrm & 7;
    if (base == 4) {
        int sib = *operand.end++, index = (sib >> 3 & 7) | index_bit << 3;
        base = sib & 7;
        if (index != 4) operand.stride = read_register(context, index) << (sib >> 6);
        if (base == 5 && mode == 0) {
            operand.start = (uint64_t)(int64_t) * (const int32_t *)operand.end;
            operand.end += 4;
            return operand;
        }
    } else if (base == 5 && mode == 0) { /* relative to the next instruction */
        operand.end += 4;
        operand.start = (uint64_t)operand.end + (uint64_t)(int64_t) * (const int32_t *)(operand.end - 4);
        return operand;
    }
    operand.start = read_register(context, base | base_bit << 3);
    if (mode == 1) operand.start += (uint64_t)(int64_t) * (const int8_t *)operand.end++;
    if (mode == 2) {
        operand.start += (uint64_t)(int64_t) * (const int32_t *)operand.end;
        operand.end += 4;
    }
    return operand;
}

static void load_config(const uint8_t *config) {
    memset(&state, 0, sizeof state);
    if (config[0] == 0) return;
    if (config[0] != 1 || config[1] != 0) fail("only palette 1 with start row 0 is known");
    for (int i = 2; i < 64; i++)
        if (config[i] && (i < 16 || (i >= 32 && i < 48) || i >= 56)) fail("reserved bytes of the configuration must be zero");
    for (int tile = 0; tile < TILES; tile++) {
        state.bytes[tile] = config[16 + 2 * tile] | config[17 + 2 * tile] << 8;
        state.rows[tile] = config[48 + tile];
        if (state.bytes[tile] > MAX_BYTES || state.rows[tile] > MAX_ROWS) fail("a tile has at most 16 rows of 64 bytes");
    }
    state.configured = 1;
}

static void check(int tile) {
    if (!state.configured || tile >= TILES || !state.rows[tile] || !state.bytes[tile]) fail("a tile that is not configured");
}

static float flush(float x) { return fabsf(x) < 0x1p-126f ? copysignf(0, x) : x; }

static float from_bfloat16(uint16_t bits) {
    uint32_t word = (uint32_t)bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return flush(x);
}

/* C += A times B; a row of B holds the numbers of four bytes of a row of A, one word for each column. */
static void multiply(int c, int a, int b, int is_float, int a_is_signed, int b_is_signed) {
    check(c), check(a), check(b);
    if (c == a || c == b || a == b) fail("the tiles of a product must differ");
    int depth = state.bytes[a] / 4, columns = state.bytes[c] / 4;
    if (state.bytes[a] % 4 || state.bytes[c] % 4 || state.bytes[b] != state.bytes[c] || state.rows[a] != state.rows[c] || state.rows[b] != depth)
        fail("shapes that do not fit");
    for (int row = 0; row < state.rows[c]; row++) {
        if (is_float) {
            float sums[MAX_BYTES / 4][2] = {{0}};
            for (int k = 0; k < depth; k++)
                for (int column = 0; column < columns; column++)
                    for (int i = 0; i < 2; i++) {
                        uint16_t x, y;
                        memcpy(&x, &state.data[a][row][4 * k + 2 * i], 2);
                        memcpy(&y, &state.data[b][k][4 * column + 2 * i], 2);
                        sums[column][i] = flush(fmaf(from_bfloat16(x), from_bfloat16(y), sums[column][i]));
                    }
            for (int column = 0; column < columns; column++) {
                float before;
                memcpy(&before, &state.data[c][row][4 * column], 4);
                before = flush(flush(before) + flush(sums[column][0] + sums[column][1]));
                memcpy(&state.data[c][row][4 * column], &before, 4);
            }
        } else {
            uint32_t sums[MAX_BYTES / 4] = {0};
            for (int k = 0; k < depth; k++)
                for (int column = 0; column < columns; column++)
                    for (int i = 0; i < 4; i++) {
                        uint8_t x = state.data[a][row][4 * k + i], y = state.data[b][k][4 * column + i];
                        int32_t left = a_is_signed ? (int8_t)x : x, right = b_is_signed ? (int8_t)y : y;
                        sums[column] += (uint32_t)(left * right);
                    }
            for (int column = 0; column < columns; column++) {
                uint32_t before;
                memcpy(&before, &state.data[c][row][4 * column], 4);
                before += sums[column];
                memcpy(&state.data[c][row][4 * column], &before, 4);
            }
        }
    }
}

static struct sigaction other; /* of whoever wants SIGILL as well: Python's faulthandler */
typedef int (*sigaction_function)(int, const struct sigaction *, struct sigaction *);

static int real_sigaction(int signal, const struct sigaction *new, struct sigaction *old) {
    static sigaction_function real;
    if (!real) real = (sigaction_function)dlsym(RTLD_NEXT, "sigaction");
    return real(signal, new, old);
}

int sigaction(int signal, const struct sigaction *new, struct sigaction *old) {
    if (signal != SIGILL) return real_sigaction(signal, new, old);
    if (old) *old = other;
    if (new) other = *new;
    return 0;
}

static void emulate(int signal, siginfo_t *info, void *argument) {
    ucontext_t *context = argument;
    const uint8_t *code = (const uint8_t *)context->uc_mcontext.gregs[REG_RIP];
    int map = code[1] & 0x1f, length = code[2] >> 2 & 1, width = code[2] >> 7, opcode = code[3];
    if (code[0] != 0xc4 || map != 2 || length || width || !(opcode == 0x49 || opcode == 0x4b || opcode == 0x5c || opcode == 0x5e)) {
        real_sigaction(SIGILL, &other, NULL); /* none of ours: it traps again, for the other handler */
        return;
    }
    int prefix = code[2] & 3, third = ~(code[2] >> 3) & 15, base_bit = !(code[1] & 0x20), index_bit = !(code[1] & 0x40);
    const uint8_t *modrm = code + 4;
    int is_memory = *modrm >> 6 != 3, tile = *modrm >> 3 & 7, second = *modrm & 7;
    const uint8_t *end = modrm + 1;
    enum { NONE, P66, PF3, PF2 };
    if (opcode == 0x49 && prefix == NONE && is_memory) {
        struct operand operand = read_operand(context, modrm, base_bit, index_bit);
        load_config((const uint8_t *)(operand.start + operand.stride));
        end = operand.end;
    } else if (opcode == 0x49 && prefix == NONE && *modrm == 0xc0) {
        memset(&state, 0, sizeof state);
    } else if (opcode == 0x49 && prefix == PF2 && !is_memory) {
        check(tile);
        memset(state.data[tile], 0, sizeof state.data[tile]);
    } else if (opcode == 0x4b && prefix != NONE && is_memory && second == 4) {
        struct operand operand = read_operand(context, modrm, base_bit, index_bit);
        check(tile);
        if (prefix != PF3) memset(state.data[tile], 0, sizeof state.data[tile]);
        for (int row = 0; row < state.rows[tile]; row++) {
            uint8_t *memory = (uint8_t *)(operand.start + row * operand.stride);
            if (prefix == PF3) memcpy(memory, state.data[tile][row], state.bytes[tile]);
            else memcpy(state.data[tile][row], memory, state.bytes[tile]);
        }
        end = operand.end;
    } else if (opcode == 0x5c && prefix == PF3 && !is_memory) {
        multiply(tile, second, third, 1, 0, 0);
    } else if (opcode == 0x5e && !is_memory) {
        multiply(tile, second, third, 0, prefix == PF2 || prefix == PF3, prefix == PF2 || prefix == P66);
    } else {
        fail("an instruction that it does not know");
    }
    context->uc_mcontext.gregs[REG_RIP] = (greg_t)end;
    (void)signal, (void)info;
}

/* The kernel of a machine without AMX does not grant it: this does. */
long syscall(long number, ...) {
    enum { ARCH_PRCTL = 158, ARCH_REQ_XCOMP_PERM = 0x1023 };
    static long (*real)(long, ...);
    va_list list;
    va_start(list, number);
    long arguments[6];
    for (int i = 0; i < 6; i++) arguments[i] = va_arg(list, long);
    va_end(list);
    if (number == ARCH_PRCTL && arguments[0] == ARCH_REQ_XCOMP_PERM) return getenv("AMX_EMULATOR_REFUSES") ? -1 : 0;
    if (!real) real = (long (*)(long, ...))dlsym(RTLD_NEXT, "syscall");
    return real(number, arguments[0], arguments[1], arguments[2], arguments[3], arguments[4], arguments[5]);
}

__attribute__((constructor)) static void install(void) {
    struct sigaction action = {.sa_sigaction = emulate, .sa_flags = SA_SIGINFO | SA_ONSTACK | SA_NODEFER};
    sigemptyset(&action.sa_mask);
    real_sigaction(SIGILL, &action, &other);
}

// Guard mapped files against SIGBUS. A mapped file can be truncated, or its disk can fail, while the file is
// read. The system then sends SIGBUS, which would end the process.
//
// The guard watches ranges of addresses. On a fault inside a range, the handler marks the range and maps zeros
// over the rest of it, so that the reader continues. The reader must ask afterwards whether the range has
// faulted, and discard all results of the zeros. Any other fault goes to the previously installed handler.
//
// The handler can run on any thread at any moment, so it takes no lock and calls nothing but mmap. It may see a
// range that another thread is adding or removing, but the range of the faulting thread is stable: a range is
// watched before it is read, and forgotten before it is unmapped.

#define _GNU_SOURCE
#include <errno.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <unistd.h>

typedef struct {
    atomic_int faulted;               // the first field, because Python reads it
    atomic_int taken;                 // this entry of the table is in use
    atomic_uintptr_t first, end;      // addresses; an end of 0 means that nothing is watched
} range;

#define RANGES 256

typedef struct chunk {
    range ranges[RANGES];
    _Atomic(struct chunk *) next;
} chunk;

static chunk table;                   // chunks are never freed
static uintptr_t page_bytes;
static struct sigaction previous;

// Return whether the address lies in the range. The end is 0 while the range changes, so it is read twice.
static int holds(range *r, uintptr_t address, uintptr_t *end) {
    *end = atomic_load(&r->end);
    return address < *end && address >= atomic_load(&r->first) && atomic_load(&r->end) == *end;
}

static int map_zeros(uintptr_t address) {
    for (chunk *c = &table; c; c = atomic_load(&c->next))
        for (range *r = c->ranges; r < c->ranges + RANGES; r++) {
            uintptr_t end;
            if (!holds(r, address, &end)) continue;
            // Mark the range before mapping the zeros, so that no thread reads a zero from an unmarked range.
            atomic_store(&r->faulted, 1);
            const uintptr_t page = address & ~(page_bytes - 1);
            return mmap((void *)page, end - page, PROT_READ,
                        MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0) != MAP_FAILED;
        }
    return 0;
}

static void on_bus_error(int signal, siginfo_t *info, void *context) {
    const int error = errno;
    // A signal sent by a process, not by a fault, has a code of 0 or less and no address.
    const int handled = info->si_code > 0 && map_zeros((uintptr_t)info->si_addr);
    errno = error;
    if (handled) return;
    if (previous.sa_flags & SA_SIGINFO) {
        previous.sa_sigaction(signal, info, context);
    } else if (previous.sa_handler != SIG_DFL && previous.sa_handler != SIG_IGN) {
        previous.sa_handler(signal);
    } else {
        // The faulting instruction runs again, or the signal is raised again, with the default action.
        sigaction(signal, &previous, NULL);
        if (info->si_code <= 0) raise(signal);
    }
}

// Install the handler on the first call. Return 0, or -1 on failure.
int install_guard(void) {
    static atomic_int installed;
    if (atomic_exchange(&installed, 1)) return 0;
    struct sigaction action = {.sa_sigaction = on_bus_error, .sa_flags = SA_SIGINFO | SA_RESTART};
    page_bytes = (uintptr_t)sysconf(_SC_PAGESIZE);
    sigemptyset(&action.sa_mask);
    // Read the previous handler first, because a fault may occur as soon as the new handler is installed.
    if (sigaction(SIGBUS, NULL, &previous)) return -1;
    return sigaction(SIGBUS, &action, NULL);
}

static range *free_range(chunk *c) {
    for (range *r = c->ranges; r < c->ranges + RANGES; r++)
        if (!atomic_load(&r->taken) && !atomic_exchange(&r->taken, 1)) return r;
    return NULL;
}

// Watch the addresses [first, first + size). Return the range, or NULL if memory is short.
range *watch_range(uintptr_t first, size_t size) {
    chunk *c = &table;
    range *r;
    while (!(r = free_range(c))) {
        if (!atomic_load(&c->next)) {
            chunk *fresh = calloc(1, sizeof *fresh), *none = NULL;
            if (!fresh) return NULL;
            if (!atomic_compare_exchange_strong(&c->next, &none, fresh)) free(fresh);
        }
        c = atomic_load(&c->next);
    }
    atomic_store(&r->faulted, 0);
    atomic_store(&r->first, first);
    atomic_store(&r->end, first + size);
    return r;
}

// Stop watching the range. The thread that watched the range must call this before unmapping it.
void forget_range(range *r) {
    atomic_store(&r->end, 0);
    atomic_store(&r->taken, 0);
}

/* Threads that compute a kernel's work together with the one that calls it.

   The caller never waits for a thread that has not begun: where another one has its core, a reader of
   the disk for instance, the caller does the work alone. A thread that has nothing to do looks for
   more for a while, since to be woken takes it as long as small works do, and sleeps then. (Measured
   on two cores beside a disk that is read: attention of 64 sequences 4.6 ms, 5.3 with threads that
   sleep at once and are all waited for.) */

#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <time.h>

/* A core has nothing to do for a moment. */
#if defined(__SSE2__)
#define IDLE __builtin_ia32_pause()
#else
#define IDLE __asm__ volatile("")
#endif

/* Looks of a thread that waits for others before it lets these have its core. */
#define MOST_LOOKS 1000
/* How long a thread looks for work before it sleeps. */
#define AWAKE_NS 200000
#define LOOKS_PER_CLOCK 64

typedef void (*Kernel)(void *work);

static struct {
    /* A call's number, from bit 32 on; how many may still begin, from bit 16 on; how many are at
       it. Whoever begins changes it in one step, so that nobody begins what has been left. */
    uint64_t call;
    Kernel kernel;
    void *work;
    int is_in_use, num_threads, num_asleep;
    int is_full; /* the system has refused a thread: it is not asked again in every call */
    pthread_mutex_t lock;
    pthread_cond_t called;
} team = {.lock = PTHREAD_MUTEX_INITIALIZER, .called = PTHREAD_COND_INITIALIZER};

#define ONE_MAY_BEGIN (UINT64_C(1) << 16)
#define NONE_MAY_BEGIN (~(UINT64_C(0xffff) << 16))

INLINE uint64_t number_of(uint64_t call) { return call >> 32; }

INLINE int may_begin(uint64_t call, uint64_t last) {
    return number_of(call) != last && call & ~NONE_MAY_BEGIN;
}

INLINE void look_again(int64_t looks) {
    if (looks < MOST_LOOKS)
        IDLE;
    else
        sched_yield();
}

static int64_t now_ns(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return now.tv_sec * INT64_C(1000000000) + now.tv_nsec;
}

/* Returns when there is a call behind the last one that may be begun, awake or woken. */
static uint64_t next_call(uint64_t last) {
    const int64_t until_ns = now_ns() + AWAKE_NS;
    uint64_t call;
    do
        for (int i = 0; i < LOOKS_PER_CLOCK; i++) {
            call = __atomic_load_n(&team.call, __ATOMIC_RELAXED);
            if (may_begin(call, last))
                return call;
            IDLE;
        }
    while (now_ns() < until_ns);
    pthread_mutex_lock(&team.lock);
    __atomic_fetch_add(&team.num_asleep, 1, __ATOMIC_SEQ_CST);
    while (!may_begin(call = __atomic_load_n(&team.call, __ATOMIC_SEQ_CST), last))
        pthread_cond_wait(&team.called, &team.lock);
    __atomic_fetch_sub(&team.num_asleep, 1, __ATOMIC_SEQ_CST);
    pthread_mutex_unlock(&team.lock);
    return call;
}

static void *help(void *unused) {
    uint64_t last = 0;
    for (;;) {
        uint64_t call = next_call(last);
        if (!__atomic_compare_exchange_n(&team.call, &call, call - ONE_MAY_BEGIN + 1, 0,
                                         __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            continue;
        last = number_of(call);
        team.kernel(team.work);
        __atomic_fetch_sub(&team.call, 1, __ATOMIC_RELEASE);
    }
    return unused;
}

/* Whether a process that is forked off begins anew; its own children do, too. */
static int forks_are_watched;

/* A process that was forked off has none of the threads. */
static void begin_anew(void) {
    memset(&team, 0, sizeof team);
    pthread_mutex_init(&team.lock, NULL);
    pthread_cond_init(&team.called, NULL);
}

/* Fewer where the system gives no more. Signals are left to others. */
static void have_threads(int number) {
    if (team.num_threads >= number || team.is_full)
        return;
    if (!forks_are_watched)
        forks_are_watched = !pthread_atfork(NULL, NULL, begin_anew);
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    pthread_t thread;
    while (team.num_threads < number && !team.is_full)
        if (pthread_create(&thread, NULL, help, NULL)) {
            team.is_full = 1;
        } else {
            pthread_detach(thread);
            team.num_threads++;
        }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

/* Calls the kernel with the work, on so many threads; on this one alone while others are called by
   another one. Returns when all that have begun have ended. */
OF_THE_REST void moebatch_share(Kernel kernel, void *work, int num_threads) {
    if (num_threads < 2 || __atomic_exchange_n(&team.is_in_use, 1, __ATOMIC_ACQUIRE)) {
        kernel(work);
        return;
    }
    have_threads(num_threads - 1);
    team.kernel = kernel;
    team.work = work;
    const uint64_t number = number_of(team.call) + 1;
    __atomic_store_n(&team.call, (number << 32) + (num_threads - 1) * ONE_MAY_BEGIN,
                     __ATOMIC_SEQ_CST);
    if (__atomic_load_n(&team.num_asleep, __ATOMIC_SEQ_CST)) {
        pthread_mutex_lock(&team.lock);
        pthread_cond_broadcast(&team.called);
        pthread_mutex_unlock(&team.lock);
    }
    kernel(work);
    uint64_t left = __atomic_and_fetch(&team.call, NONE_MAY_BEGIN, __ATOMIC_ACQUIRE);
    for (int64_t i = 0; left & 0xffff; left = __atomic_load_n(&team.call, __ATOMIC_ACQUIRE))
        look_again(i++);
    __atomic_store_n(&team.is_in_use, 0, __ATOMIC_RELEASE);
}

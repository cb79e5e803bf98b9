/* A small pool of threads that share one piece of work and sleep in between: nothing ever spins.
 *
 * The caller works too, so a pool of n threads starts n - 1 helpers. A helper that wakes late finds the work withdrawn
 * and sleeps on: the caller waits for helpers that have begun, never for one that the machine has not scheduled yet.
 *
 * A process forked off later has none of the helpers: there the pool may be stopped and nothing else.
 */
#ifndef RP_THREADS_H
#define RP_THREADS_H

#include <errno.h>
#include <pthread.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdlib.h>
#include <unistd.h>

/* `thread` is 0 for the caller and 1..n-1 for the helpers. */
typedef void rp_work(void *argument, int32_t thread);

typedef struct {
    pthread_mutex_t lock; /* guards everything down to `stop` */
    pthread_cond_t offered;
    pthread_cond_t finished;
    rp_work *work;
    void *argument;
    int32_t open_places; /* helpers that may still join the current work */
    int32_t working;     /* helpers that have joined and not yet returned */
    bool stop;
    int32_t helpers;
    pthread_t *threads;
    pid_t process; /* where the helpers are */
} rp_threads;

typedef struct {
    rp_threads *pool;
    int32_t thread;
} rp_helper;

static void *rp_help(void *memory)
{
    const rp_helper self = *(rp_helper *)memory;
    rp_threads *pool = self.pool;
    free(memory);

    pthread_mutex_lock(&pool->lock);
    for (;;) {
        while (!pool->stop && pool->open_places == 0)
            pthread_cond_wait(&pool->offered, &pool->lock);
        if (pool->stop)
            break;
        pool->open_places--;
        pool->working++;
        pthread_mutex_unlock(&pool->lock);
        pool->work(pool->argument, self.thread);
        pthread_mutex_lock(&pool->lock);
        if (--pool->working == 0)
            pthread_cond_signal(&pool->finished);
    }
    pthread_mutex_unlock(&pool->lock);
    return NULL;
}

/* Run `work` on the caller and on up to helpers_wanted helpers; return when all that joined have returned. */
static void rp_threads_run(rp_threads *pool, rp_work *work, void *argument, int32_t helpers_wanted)
{
    const int32_t places = helpers_wanted < pool->helpers ? helpers_wanted : pool->helpers;
    if (places <= 0) {
        work(argument, 0);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->work = work;
    pool->argument = argument;
    pool->open_places = places;
    for (int32_t i = 0; i < places; i++)
        pthread_cond_signal(&pool->offered);
    pthread_mutex_unlock(&pool->lock);

    work(argument, 0);

    pthread_mutex_lock(&pool->lock);
    pool->open_places = 0;
    while (pool->working > 0)
        pthread_cond_wait(&pool->finished, &pool->lock);
    pthread_mutex_unlock(&pool->lock);
}

static void rp_threads_stop(rp_threads *pool)
{
    if (getpid() != pool->process) { /* nobody to join, and a helper may have held the lock when we were forked */
        free(pool->threads);
        return;
    }
    pthread_mutex_lock(&pool->lock);
    pool->stop = true;
    pthread_cond_broadcast(&pool->offered);
    pthread_mutex_unlock(&pool->lock);
    for (int32_t i = 0; i < pool->helpers; i++)
        pthread_join(pool->threads[i], NULL);
    pthread_cond_destroy(&pool->finished);
    pthread_cond_destroy(&pool->offered);
    pthread_mutex_destroy(&pool->lock);
    free(pool->threads);
}

/* Returns 0, or an errno; then nothing is left running. */
static int rp_threads_start(rp_threads *pool, int32_t threads)
{
    *pool = (rp_threads){.threads = calloc((size_t)threads, sizeof(pthread_t)), .process = getpid()};
    if (!pool->threads)
        return ENOMEM;
    pthread_mutex_init(&pool->lock, NULL);
    pthread_cond_init(&pool->offered, NULL);
    pthread_cond_init(&pool->finished, NULL);

    int error = 0;
    while (!error && pool->helpers < threads - 1) {
        rp_helper *helper = malloc(sizeof *helper);
        if (!helper) {
            error = ENOMEM;
            break;
        }
        *helper = (rp_helper){.pool = pool, .thread = pool->helpers + 1};
        error = pthread_create(&pool->threads[pool->helpers], NULL, rp_help, helper);
        if (error)
            free(helper);
        else
            pool->helpers++;
    }
    if (error)
        rp_threads_stop(pool);
    return error;
}

#endif

/*
 * A disk in trouble, between a process and its C library (LD_PRELOAD).
 *
 * TROUBLE_ROOT: paths below it are watched. TROUBLE_ORDERS: a file of lines "OPERATION ERRNO MICROSECONDS [PATTERN]", read
 * anew at each operation; with an errno it fails, with -1 it waits for other orders, the time is waited for each MB.
 * The pattern is of paths below the root, which is "."; who waits says so in the file TROUBLE_ORDERS.here.
 * TROUBLE_LOG: every change that was made is appended, in the order in which they were: "OPERATION\tPATH\tOTHER\tOFFSET\tSIZE\n" and SIZE bytes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <fnmatch.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <unistd.h>

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

#define REAL(type, name, ...) type (*real)(__VA_ARGS__) = (type (*)(__VA_ARGS__))dlsym(RTLD_NEXT, name)

static int is_ours(const char *path) {
    const char *root = getenv("TROUBLE_ROOT");
    return root && strncmp(path, root, strlen(root)) == 0;
}

static int path_of(int fd, char *path) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t size = readlink(link, path, PATH_MAX - 1);
    if (size < 0) return 0;
    path[size] = 0;
    return is_ours(path);
}

static int path_at(int fd, const char *name, char *path) {
    if (name[0] == '/' || fd == AT_FDCWD) snprintf(path, PATH_MAX, "%s", name);
    else {
        char folder[PATH_MAX];
        if (!path_of(fd, folder)) return 0;
        snprintf(path, PATH_MAX, "%.2000s/%.2000s", folder, name);
    }
    return is_ours(path);
}

static int fits(const char *pattern, const char *path) {
    const char *below = path + strlen(getenv("TROUBLE_ROOT"));
    return fnmatch(pattern, *below ? below + 1 : ".", FNM_PATHNAME | FNM_PERIOD) == 0;
}

/* What the orders say of this operation now: an errno, 0, or -1. */
static int asked(const char *operation, const char *path, size_t size) {
    const char *name = getenv("TROUBLE_ORDERS");
    int fd = name ? (int)syscall(SYS_openat, AT_FDCWD, name, O_RDONLY | O_CLOEXEC, 0) : -1;
    if (fd < 0) return 0;
    char text[512] = {0}, what[32], pattern[256];
    ssize_t got = read(fd, text, sizeof text - 1);
    syscall(SYS_close, fd);
    int code = 0, found = 0;
    long wait = 0;
    for (char *line = got > 0 ? strtok(text, "\n") : NULL; line; line = strtok(NULL, "\n")) {
        int fields = sscanf(line, "%31s %d %ld %255s", what, &code, &wait, pattern);
        if (fields < 3 || strcmp(what, operation) != 0 || (fields > 3 && !fits(pattern, path))) continue;
        found = code;
        if (wait && size) usleep((useconds_t)(wait * (size / 1e6)));
    }
    return found;
}

static void wait_here(void) {
    char here[PATH_MAX];
    snprintf(here, sizeof here, "%.4000s.here", getenv("TROUBLE_ORDERS"));
    int fd = (int)syscall(SYS_openat, AT_FDCWD, here, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) syscall(SYS_close, fd);
    usleep(20000);
}

/* The errno that this operation must fail with, or 0. */
static int ordered(const char *operation, const char *path, size_t size) {
    int code;
    while ((code = asked(operation, path, size)) < 0) wait_here();
    return code;
}

static void note(const char *operation, const char *path, const char *other, off_t at, const void *data, size_t size) {
    const char *name = getenv("TROUBLE_LOG");
    if (!name) return;
    REAL(ssize_t, "write", int, const void *, size_t);
    char head[2 * PATH_MAX + 100];
    int length = snprintf(head, sizeof head, "%s\t%s\t%s\t%lld\t%zu\n", operation, path, other, (long long)at, size);
    int fd = (int)syscall(SYS_openat, AT_FDCWD, name, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    real(fd, head, (size_t)length);
    if (size) real(fd, data, size);
    close(fd);
}

#define BEGIN(operation, path, size)                             \
    int code = ordered(operation, path, size);                   \
    if (code) { errno = code; return -1; }                       \
    pthread_mutex_lock(&lock);

#define END(condition, ...)                                      \
    int before = errno;                                          \
    if (condition) note(__VA_ARGS__);                            \
    pthread_mutex_unlock(&lock);                                 \
    errno = before;                                              \
    return result;

static int opened(int folder, const char *name, int flags, mode_t mode) {
    REAL(int, "openat64", int, const char *, int, ...);
    char path[PATH_MAX];
    if (!(flags & O_CREAT) || !path_at(folder, name, path)) return real(folder, name, flags, mode);
    BEGIN("open", path, 0)
    int result = real(folder, name, flags, mode);
    END(result >= 0, flags & O_TRUNC ? "empty" : "create", path, "", 0, NULL, 0)
}

#define MODE(flags) mode_t mode = 0; if ((flags) & O_CREAT) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int open(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE(flags) return opened(AT_FDCWD, name, flags, mode); }
int openat(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }
int openat64(int folder, const char *name, int flags, ...) { MODE(flags) return opened(folder, name, flags, mode); }

static ssize_t put(int fd, const void *data, size_t size, off_t at) {
    REAL(ssize_t, "pwrite64", int, const void *, size_t, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, data, size, at);
    BEGIN("write", path, size)
    ssize_t result = real(fd, data, size, at);
    END(result > 0, "write", path, "", at, data, (size_t)result)
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return put(fd, data, size, at); }
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) { return put(fd, data, size, at); }

ssize_t write(int fd, const void *data, size_t size) {
    REAL(ssize_t, "write", int, const void *, size_t);
    char path[PATH_MAX];
    if (fd < 3 || !path_of(fd, path)) return real(fd, data, size);
    off_t at = lseek(fd, 0, SEEK_CUR);
    BEGIN("write", path, size)
    ssize_t result = real(fd, data, size);
    END(result > 0, "write", path, "", at, data, (size_t)result)
}

static int cut(int fd, off_t size) {
    REAL(int, "ftruncate64", int, off_t);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd, size);
    BEGIN("truncate", path, 0)
    int result = real(fd, size);
    END(result == 0, "truncate", path, "", size, NULL, 0)
}
int ftruncate(int fd, off_t size) { return cut(fd, size); }
int ftruncate64(int fd, off64_t size) { return cut(fd, size); }

int fsync(int fd) {
    REAL(int, "fsync", int);
    char path[PATH_MAX];
    if (!path_of(fd, path)) return real(fd);
    BEGIN("fsync", path, 0)
    int result = real(fd);
    END(result == 0, "fsync", path, "", 0, NULL, 0)
}

int close(int fd) {
    REAL(int, "close", int);
    char path[PATH_MAX];
    if (fd < 3 || !path_of(fd, path)) return real(fd);
    int code = ordered("close", path, 0), result = real(fd);
    if (result == 0 && code) { errno = code; return -1; }  /* as with write(2): the file is closed all the same */
    return result;
}

int mkdir(const char *path, mode_t mode) {
    REAL(int, "mkdir", const char *, mode_t);
    if (!is_ours(path)) return real(path, mode);
    BEGIN("mkdir", path, 0)
    int result = real(path, mode);
    END(result == 0, "mkdir", path, "", 0, NULL, 0)
}

int rename(const char *from, const char *to) {
    REAL(int, "rename", const char *, const char *);
    if (!is_ours(from)) return real(from, to);
    BEGIN("rename", from, 0)
    int result = real(from, to);
    END(result == 0, "rename", from, to, 0, NULL, 0)
}

int unlinkat(int folder, const char *name, int flags) {
    REAL(int, "unlinkat", int, const char *, int);
    char path[PATH_MAX];
    if (!path_at(folder, name, path)) return real(folder, name, flags);
    BEGIN("remove", path, 0)
    int result = real(folder, name, flags);
    END(result == 0, "remove", path, "", 0, NULL, 0)
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }

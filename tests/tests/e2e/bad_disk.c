/* A disk that is full, or that fails now and then, for what a process writes below a directory:
 * loaded before the C library (LD_PRELOAD). BAD_DISK_DIR is the directory, BAD_DISK_BYTES what all of
 * its files may have together, BAD_DISK_EIO_EVERY which writes fail; 0 or unset is none. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static atomic_ulong writes;

static unsigned long number(const char *name)
{
    const char *value = getenv(name);
    return value ? strtoul(value, NULL, 10) : 0;
}

/* Whether a descriptor is of a file in the directory. */
static int is_below(int fd, const char *dir)
{
    char link[64], path[PATH_MAX];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = readlink(link, path, sizeof path - 1);
    size_t length = strlen(dir);
    return n > (ssize_t)length && strncmp(path, dir, length) == 0 && path[length] == '/';
}

static unsigned long used(const char *dir)
{
    unsigned long sum = 0;
    DIR *all = opendir(dir);
    if (!all)
        return 0;
    for (struct dirent *entry; (entry = readdir(all));) {
        struct stat file;
        if (fstatat(dirfd(all), entry->d_name, &file, AT_SYMLINK_NOFOLLOW) == 0 && S_ISREG(file.st_mode))
            sum += (unsigned long)file.st_size;
    }
    closedir(all);
    return sum;
}

/* The error of a write of so many bytes, or 0. */
static int error_of(int fd, size_t bytes, off64_t at)
{
    const char *dir = getenv("BAD_DISK_DIR");
    if (!dir || !is_below(fd, dir))
        return 0;
    unsigned long every = number("BAD_DISK_EIO_EVERY"), most = number("BAD_DISK_BYTES");
    if (every && atomic_fetch_add(&writes, 1) % every == every - 1)
        return EIO;
    struct stat file;
    if (!most || fstat(fd, &file) != 0)
        return 0;
    long long grows = (long long)at + (long long)bytes - (long long)file.st_size;
    return grows > 0 && used(dir) + (unsigned long)grows > most ? ENOSPC : 0;
}

typedef ssize_t (*write_at)(int, const void *, size_t, off64_t);

static ssize_t checked(const char *name, int fd, const void *from, size_t bytes, off64_t at)
{
    int error = error_of(fd, bytes, at);
    if (error) {
        errno = error;
        return -1;
    }
    return ((write_at)dlsym(RTLD_NEXT, name))(fd, from, bytes, at);
}

ssize_t pwrite64(int fd, const void *from, size_t bytes, off64_t at)
{
    return checked("pwrite64", fd, from, bytes, at);
}

ssize_t pwrite(int fd, const void *from, size_t bytes, off_t at)
{
    return checked("pwrite", fd, from, bytes, at);
}

/* The load client: one core, one epoll, any number of streams.
 *
 *     load PORT PATH BODY [--streams N] [--websocket] [--repeat] [--warm S] [--seconds S] [--batch N] [--patience S]
 *
 * It opens N streams, at most `batch` of them waiting for their first event at a time, lets them run for `warm` seconds,
 * measures for `seconds`, and says each phase on a line of JSON as it begins: open, measuring, measured. Then it holds
 * everything open until its standard input ends. A stream is a POST of BODY that is answered by server-sent events, or
 * with --websocket a socket whose first frame is BODY. With --repeat each connection asks again as soon as its answer
 * has ended, and what is measured is the time from a request to its first token.
 *
 * Three parsers, each fed with whatever the kernel had: HTTP's head and chunks (`http`), WebSocket's frames
 * (`websocket`), an event stream's lines (`lines`). Each may be cut anywhere; what is not whole yet is held for the
 * connection in `held`, which only ever belongs to one of them at a time.
 *
 * A token is an event whose data has a `"content":"…"` that is not empty; the times of tokens are taken at the read that
 * brought them, once per read.
 */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <getopt.h>
#include <math.h>
#include <netinet/tcp.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

static double seconds_of(clockid_t clock) {
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec + (double)t.tv_nsec / 1e9;
}

static double now_s(void) { return seconds_of(CLOCK_MONOTONIC); }

static void die(const char *what) {
    perror(what);
    exit(1);
}

/* --- times: a histogram whose buckets are 1 % wide, from a microsecond to a quarter of an hour ---------------------- */

#define BUCKETS 2100
typedef struct {
    uint64_t count[BUCKETS], n;
    double most;
} Times;

static void times_add(Times *times, double s, uint64_t n) {
    int bucket = s <= 1e-6 ? 0 : (int)(log(s * 1e6) / log(1.01));
    times->count[bucket < BUCKETS ? bucket : BUCKETS - 1] += n;
    times->n += n;
    if (s > times->most) times->most = s;
}

static double times_ms(const Times *times, double share) {
    uint64_t seen = 0;
    for (int i = 0; i < BUCKETS; i++)
        if ((seen += times->count[i]) > (uint64_t)(share * (double)times->n)) return i ? exp(i * log(1.01)) / 1e3 : 0;
    return times->most * 1e3;
}

static void times_print(const char *name, const Times *times) {
    if (times->n)
        printf(", \"%s\": {\"p50\": %.3f, \"p99\": %.3f, \"max\": %.3f}", name, times_ms(times, .5), times_ms(times, .99),
               times->most * 1e3);
    else
        printf(", \"%s\": null", name);
}

/* --- a connection --------------------------------------------------------------------------------------------------- */

typedef enum { CONNECTING, HEAD, SIZE, DATA, DATA_END, TRAILER, FRAMES, PLAIN, CLOSED } State;
typedef enum { NOTHING, OTHER, TOKEN, ERROR, LAST } Kind;

typedef struct {
    int fd;
    State state;
    size_t left;       /* of the chunk */
    size_t line_bytes; /* of the trailer's line so far */
    Kind kind;         /* of the event that is being read */
    char *held;
    size_t held_n;
    bool ready;        /* its first event was there */
    bool answered;     /* its request has its first token */
    double asked_s, token_s;
    uint64_t tokens;   /* while measured */
} Conn;

static struct {
    int port, streams, batch;
    bool websocket, repeat;
    double warm_s, seconds_s, patience_s;
    char *request, *first_frame;
    size_t request_n, first_frame_n;
} asked = {.streams = 1, .batch = 64, .warm_s = 1, .seconds_s = 3, .patience_s = 60};

static struct {
    bool on;
    uint64_t events, tokens, requests, bytes, pings;
    Times gaps, first_token;
} measured;

static int epoll, started, ready, closed;
static uint64_t errors;
static char first_error[256];
static Times first_event;

static void failed(const char *what, const char *detail, size_t n) {
    if (!errors++) snprintf(first_error, sizeof first_error, "%s %.*s", what, (int)(n < 160 ? n : 160), detail);
}

static void hold(Conn *conn, const char *bytes, size_t n) {
    if (!n) return;
    if (!(conn->held = realloc(conn->held, conn->held_n + n))) die("realloc");
    memcpy(conn->held + conn->held_n, bytes, n);
    conn->held_n += n;
}

static void forget(Conn *conn) {
    free(conn->held);
    conn->held = NULL;
    conn->held_n = 0;
}

static void say(Conn *conn, const char *bytes, size_t n) {
    if (send(conn->fd, bytes, n, MSG_NOSIGNAL) != (ssize_t)n) failed("send:", strerror(errno), 160);
}

static void ask(Conn *conn) {
    conn->asked_s = now_s();
    conn->answered = false;
    conn->state = HEAD;
    say(conn, asked.request, asked.request_n);
}

static void stop(Conn *conn) {
    if (conn->state == CLOSED) return;
    if (!conn->ready) ready++; /* it will not be waited for */
    conn->state = CLOSED;
    close(conn->fd);
    closed++;
}

/* --- what a piece of data says -------------------------------------------------------------------------------------- */

static Kind kind_of(const char *data, size_t n) {
    static const char content[] = "\"content\":\"";
    if (n >= 9 && !memcmp(data, "{\"error\":", 9)) return ERROR;
    if (n == 6 && !memcmp(data, "[DONE]", 6)) return LAST;
    const char *found = memmem(data, n, content, sizeof content - 1);
    if (!found) return OTHER;
    found += sizeof content - 1;
    return found < data + n && *found != '"' ? TOKEN : OTHER;
}

static void event(Conn *conn, Kind kind, const char *data, size_t n, double now) {
    if (kind == ERROR) failed("error event:", data, n);
    if (!conn->ready) {
        conn->ready = true;
        ready++;
        times_add(&first_event, now - conn->asked_s, 1);
    }
    measured.events += measured.on;
    if (kind != TOKEN) return;
    if (!conn->answered) {
        conn->answered = true;
        if (measured.on) times_add(&measured.first_token, now - conn->asked_s, 1);
    } else if (measured.on)
        times_add(&measured.gaps, now - conn->token_s, 1);
    conn->token_s = now;
    measured.tokens += measured.on;
    conn->tokens += measured.on;
}

/* --- an event stream: lines that end with \n or \r\n ---------------------------------------------------------------- */

static void line(Conn *conn, const char *text, size_t n, double now) {
    if (n && text[n - 1] == '\r') n--;
    if (!n) {
        if (conn->kind != NOTHING) event(conn, conn->kind, "", 0, now);
        conn->kind = NOTHING;
    } else if (*text == ':') {
        measured.pings += measured.on;
    } else if (n >= 5 && !memcmp(text, "data:", 5)) {
        text += 5, n -= 5;
        if (n && *text == ' ') text++, n--;
        conn->kind = kind_of(text, n);
        if (conn->kind == ERROR) failed("error event:", text, n), conn->kind = OTHER;
    }
}

static void lines(Conn *conn, const char *bytes, size_t n, double now) {
    const char *end = bytes + n, *at;
    while ((at = memchr(bytes, '\n', (size_t)(end - bytes)))) {
        if (conn->held_n) {
            hold(conn, bytes, (size_t)(at - bytes));
            line(conn, conn->held, conn->held_n, now);
            forget(conn);
        } else
            line(conn, bytes, (size_t)(at - bytes), now);
        bytes = at + 1;
    }
    hold(conn, bytes, (size_t)(end - bytes));
}

/* --- WebSocket frames, RFC 6455 section 5.2 ------------------------------------------------------------------------- */

enum { TEXT = 1, CLOSE = 8, PING = 9, PONG = 10 };

static size_t frame(char *to, int opcode, const char *payload, size_t n) {
    size_t at = 0;
    to[at++] = (char)(0x80 | opcode);
    if (n < 126)
        to[at++] = (char)(0x80 | n);
    else
        to[at++] = (char)(0x80 | 126), to[at++] = (char)(n >> 8), to[at++] = (char)n;
    memset(to + at, 0, 4); /* a mask of zeros masks, and leaves the text as it is */
    memcpy(to + at + 4, payload, n);
    return at + 4 + n;
}

static size_t one_frame(Conn *conn, const char *bytes, size_t n, double now) {
    if (n < 2) return 0;
    const uint8_t *head = (const uint8_t *)bytes;
    size_t size = head[1] & 0x7f, start = size == 126 ? 4 : size == 127 ? 10 : 2;
    if (n < start) return 0;
    if (start > 2) {
        size = 0;
        for (size_t i = 2; i < start; i++) size = size << 8 | head[i];
    }
    if (n < start + size) return 0;
    const char *payload = bytes + start;
    switch (head[0]) {
    case 0x80 | TEXT:
        event(conn, kind_of(payload, size), payload, size, now);
        break;
    case 0x80 | PING: {
        char pong[256];
        measured.pings += measured.on;
        say(conn, pong, frame(pong, PONG, payload, size < 126 ? size : 125));
        break;
    }
    case 0x80 | PONG:
        break;
    case 0x80 | CLOSE:
        stop(conn);
        break;
    default:
        failed("a frame that nobody expected:", payload, size);
        stop(conn);
    }
    return start + size;
}

static void websocket(Conn *conn, const char *bytes, size_t n, double now) {
    size_t taken = 0, one;
    if (conn->held_n) {
        hold(conn, bytes, n);
        bytes = conn->held, n = conn->held_n;
    }
    while (conn->state == FRAMES && (one = one_frame(conn, bytes + taken, n - taken, now))) taken += one;
    char *old = conn->held;
    conn->held = NULL, conn->held_n = 0;
    hold(conn, bytes + taken, n - taken);
    free(old);
}

/* --- HTTP/1.1: a head, then chunks (RFC 9112 section 7.1) or frames -------------------------------------------------- */

static void head(Conn *conn) {
    const char *text = conn->held;
    size_t n = conn->held_n;
    bool wanted = n > 12 && !memcmp(text + 9, asked.websocket ? "101" : "200", 3);
    bool chunked = memmem(text, n, "chunked", 7);
    if (!wanted || !(asked.websocket || chunked)) {
        failed("answered:", text, n);
        conn->state = PLAIN;
    } else if (asked.websocket) {
        conn->state = FRAMES;
        say(conn, asked.first_frame, asked.first_frame_n);
    } else
        conn->state = SIZE, conn->left = 0;
    forget(conn);
}

static void message_end(Conn *conn) {
    measured.requests += measured.on;
    if (conn->kind != NOTHING || conn->held_n) failed("cut in the middle of an event:", conn->held, conn->held_n);
    if (asked.repeat)
        ask(conn);
    else
        stop(conn);
}

static int hex(char c) { return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1; }

static void http(Conn *conn, const char *bytes, size_t n, double now) {
    const char *end = bytes + n;
    while (bytes < end) switch (conn->state) {
        case HEAD:
            hold(conn, bytes++, 1);
            if (conn->held_n >= 4 && !memcmp(conn->held + conn->held_n - 4, "\r\n\r\n", 4)) head(conn);
            break;
        case SIZE: /* extensions do not occur */
            if (hex(*bytes) >= 0) conn->left = conn->left * 16 + (size_t)hex(*bytes);
            if (*bytes++ == '\n') conn->state = conn->left ? DATA : TRAILER, conn->line_bytes = 0;
            break;
        case DATA: {
            size_t some = (size_t)(end - bytes) < conn->left ? (size_t)(end - bytes) : conn->left;
            lines(conn, bytes, some, now);
            bytes += some;
            if (!(conn->left -= some)) conn->state = DATA_END;
            break;
        }
        case DATA_END:
            if (*bytes++ == '\n') conn->state = SIZE;
            break;
        case TRAILER:
            if (*bytes++ != '\n')
                conn->line_bytes += bytes[-1] != '\r';
            else if (conn->line_bytes)
                conn->line_bytes = 0;
            else
                message_end(conn);
            break;
        case FRAMES:
            websocket(conn, bytes, (size_t)(end - bytes), now);
            return;
        default:
            return;
        }
}

/* --- the run -------------------------------------------------------------------------------------------------------- */

static void start(Conn *conn) {
    struct sockaddr_in to = {.sin_family = AF_INET, .sin_port = htons((uint16_t)asked.port)};
    to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    struct linger reset = {1, 0}; /* no port stays behind in TIME_WAIT */
    int one = 1;
    conn->fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    if (conn->fd < 0) die("socket");
    setsockopt(conn->fd, SOL_SOCKET, SO_LINGER, &reset, sizeof reset);
    setsockopt(conn->fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    conn->asked_s = now_s();
    if (connect(conn->fd, (struct sockaddr *)&to, sizeof to) && errno != EINPROGRESS) die("connect");
    struct epoll_event wanted = {.events = EPOLLOUT, .data.ptr = conn};
    epoll_ctl(epoll, EPOLL_CTL_ADD, conn->fd, &wanted);
    started++;
}

static void connected(Conn *conn) {
    int error = 0;
    socklen_t n = sizeof error;
    getsockopt(conn->fd, SOL_SOCKET, SO_ERROR, &error, &n);
    if (error) {
        failed("connect:", strerror(error), 160);
        stop(conn);
        return;
    }
    struct epoll_event wanted = {.events = EPOLLIN, .data.ptr = conn};
    epoll_ctl(epoll, EPOLL_CTL_MOD, conn->fd, &wanted);
    double began = conn->asked_s;
    ask(conn);
    if (!asked.repeat) conn->asked_s = began; /* the connecting counts */
}

static void readable(Conn *conn) {
    static char bytes[256 * 1024];
    ssize_t n = recv(conn->fd, bytes, sizeof bytes, 0);
    if (n < 0 && errno == EAGAIN) return;
    if (n <= 0) {
        if (n < 0) failed("recv:", strerror(errno), 160);
        stop(conn);
        return;
    }
    measured.bytes += measured.on ? (uint64_t)n : 0;
    http(conn, bytes, (size_t)n, now_s());
}

static void wait_until(Conn *conns, double until, int enough) {
    struct epoll_event events[512];
    for (double now; (now = now_s()) < until && ready < enough && closed < asked.streams;) {
        while (started < asked.streams && started - ready < asked.batch) start(&conns[started]);
        int n = epoll_wait(epoll, events, 512, (int)ceil((until - now) * 1e3));
        for (int i = 0; i < n; i++) {
            Conn *conn = events[i].data.ptr;
            if (conn->state == CONNECTING)
                connected(conn);
            else if (conn->state != CLOSED)
                readable(conn);
        }
    }
}

static void report(Conn *conns, double took_s, double cpu_s) {
    uint64_t least = UINT64_MAX, most = 0;
    for (int i = 0; i < asked.streams; i++) {
        if (conns[i].tokens < least) least = conns[i].tokens;
        if (conns[i].tokens > most) most = conns[i].tokens;
    }
    printf("{\"phase\": \"measured\", \"seconds\": %.6f, \"events\": %lu, \"tokens\": %lu, \"tokens_least\": %lu, "
           "\"tokens_most\": %lu, \"bytes\": %lu, \"requests\": %lu, \"pings\": %lu, \"closed\": %d, \"errors\": %lu",
           took_s, measured.events, measured.tokens, least, most, measured.bytes, measured.requests, measured.pings, closed,
           errors);
    times_print("gap_ms", &measured.gaps);
    times_print("ttft_ms", &measured.first_token);
    printf(", \"client_cpu\": %.3f}\n", cpu_s / took_s);
    if (errors) fprintf(stderr, "load: %lu errors, the first: %s\n", errors, first_error);
}

static void run(void) {
    Conn *conns = calloc((size_t)asked.streams, sizeof *conns);
    if (!conns) die("calloc");
    epoll = epoll_create1(0);
    double began = now_s();
    wait_until(conns, began + asked.patience_s, asked.streams);
    double opening_s = now_s() - began;
    printf("{\"phase\": \"open\", \"opened\": %lu, \"opening_s\": %.6f, \"openings_per_s\": %.1f", first_event.n, opening_s,
           (double)first_event.n / opening_s);
    times_print("first_event_ms", &first_event);
    printf("}\n");
    wait_until(conns, now_s() + asked.warm_s, asked.streams + 1);
    measured.on = true;
    printf("{\"phase\": \"measuring\"}\n");
    double from = now_s(), cpu = seconds_of(CLOCK_PROCESS_CPUTIME_ID);
    wait_until(conns, from + asked.seconds_s, asked.streams + 1);
    report(conns, now_s() - from, seconds_of(CLOCK_PROCESS_CPUTIME_ID) - cpu);
    while (getchar() != EOF) {}
}

static void prepare(const char *path, const char *body) {
    size_t n = strlen(body), room = n + strlen(path) + 512;
    asked.request = malloc(room);
    asked.first_frame = malloc(n + 16);
    if (!asked.request || !asked.first_frame) die("malloc");
    const char *upgrade = "GET %s HTTP/1.1\r\nHost: localhost:%d\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                          "Sec-WebSocket-Key: bG9hZCBmb3IgYSBzZXJ2ZQ==\r\nSec-WebSocket-Version: 13\r\n\r\n";
    const char *post = "POST %s HTTP/1.1\r\nHost: localhost:%d\r\nAccept: text/event-stream\r\n"
                       "Content-Type: application/json\r\nContent-Length: %zu\r\n\r\n%s";
    int written = asked.websocket ? snprintf(asked.request, room, upgrade, path, asked.port)
                                  : snprintf(asked.request, room, post, path, asked.port, n, body);
    asked.request_n = (size_t)written;
    asked.first_frame_n = frame(asked.first_frame, TEXT, body, n);
}

int main(int argc, char **argv) {
    static const struct option options[] = {
        {"streams", 1, 0, 'n'}, {"websocket", 0, 0, 'w'}, {"repeat", 0, 0, 'r'}, {"warm", 1, 0, 'W'},
        {"seconds", 1, 0, 's'}, {"batch", 1, 0, 'b'},     {"patience", 1, 0, 'p'}, {0}};
    for (int option; (option = getopt_long(argc, argv, "", options, NULL)) != -1;) switch (option) {
        case 'n': asked.streams = atoi(optarg); break;
        case 'w': asked.websocket = true; break;
        case 'r': asked.repeat = true; break;
        case 'W': asked.warm_s = atof(optarg); break;
        case 's': asked.seconds_s = atof(optarg); break;
        case 'b': asked.batch = atoi(optarg); break;
        case 'p': asked.patience_s = atof(optarg); break;
        default: return 2;
        }
    if (argc - optind != 3) {
        fprintf(stderr, "load: expected PORT PATH BODY\n");
        return 2;
    }
    setvbuf(stdout, NULL, _IOLBF, 0);
    asked.port = atoi(argv[optind]);
    prepare(argv[optind + 1], argv[optind + 2]);
    run();
    return 0;
}

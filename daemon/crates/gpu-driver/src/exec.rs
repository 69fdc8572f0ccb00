//! Owners of what runs: streams, events, modules and their kernels, captured graphs.

use std::ffi::CString;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use super::context::Context;
use super::driver::{
    Error, EventHandle, FunctionHandle, GraphExecHandle, LaunchConfig, ModuleHandle, Priority,
    Result, StreamHandle,
};

/// An ordered queue of work, destroyed on drop; what is queued still ends.
///
/// *Invariant:* [`Stream::queued`] changes with everything that is queued. The handle is private,
/// and whoever takes it is taken to queue something ([`Stream::handle`]). Who keeps it to queue
/// more later says so by [`Stream::note_queued`], which no type asks for: the vendor's products
/// alone do (`device-gpu/src/passes.rs`).
#[derive(Debug)]
pub struct Stream {
    context: Context,
    handle: StreamHandle,
    queued: AtomicU64,
}

impl Stream {
    /// Makes a stream.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context, priority: Priority) -> Result<Stream> {
        let handle = context.driver()?.stream_create(priority)?;
        Ok(Stream {
            context: context.clone(),
            handle,
            queued: AtomicU64::new(0),
        })
    }

    /// The driver's handle, alive as long as this, to queue something.
    pub fn handle(&self) -> StreamHandle {
        self.note_queued();
        self.handle
    }

    /// A number that is another one after something was queued. Marks of events
    /// are nothing that is queued.
    pub fn queued(&self) -> u64 {
        self.queued.load(Ordering::Relaxed)
    }

    /// Something is queued by a handle that was taken before.
    pub fn note_queued(&self) {
        self.queued.fetch_add(1, Ordering::Relaxed);
    }

    /// The context of the stream's GPU.
    pub fn context(&self) -> &Context {
        &self.context
    }

    /// Waits until all that is queued has ended.
    ///
    /// # Errors
    /// Failures of that work.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.context.driver()?;
        // SAFETY: the stream is alive and of the bound context.
        unsafe { driver.stream_synchronize(self.handle) }
    }

    /// Whether all that is queued has ended.
    ///
    /// # Errors
    /// Failures of that work.
    pub fn is_idle(&self) -> Result<bool> {
        let driver = self.context.driver()?;
        // SAFETY: the stream is alive and of the bound context.
        unsafe { driver.stream_query(self.handle) }
    }

    /// Lets what is queued from now on wait until `event`, as last recorded, has passed.
    ///
    /// # Errors
    /// What the driver says.
    pub fn wait(&self, event: &Event) -> Result<()> {
        let driver = self.context.driver()?;
        // SAFETY: both are alive and of the bound context.
        unsafe { driver.stream_wait_event(self.handle(), event.handle) }
    }

    /// Records what `queue` queues on this stream, instead of doing it, and makes a graph of it.
    /// `queue` must not allocate, free or wait. The capture ends also when `queue` fails; where it
    /// was broken, the stream takes nothing any more by ROCm's runtime (seen with 7.2).
    ///
    /// # Errors
    /// What `queue` says, else what the driver says.
    pub fn capture<E: From<Error>>(
        &self,
        queue: impl FnOnce() -> Result<(), E>,
    ) -> Result<Graph, E> {
        // SAFETY: the stream is alive and of the bound context.
        unsafe { self.context.driver()?.capture_begin(self.handle())? };
        // What is queued may have to be compiled first, which is no call of the driver.
        let queued = queue();
        let driver = self.context.driver()?;
        // SAFETY: as above, on the thread that began.
        let captured = unsafe { driver.capture_end(self.handle) };
        let graph = match (queued, captured) {
            (Ok(()), Ok(graph)) => graph,
            (Err(error), captured) => {
                if let Ok(graph) = captured {
                    // SAFETY: just made, used nowhere.
                    self.context
                        .release("graph", |driver| unsafe { driver.graph_destroy(graph) });
                }
                return Err(error);
            }
            (Ok(()), Err(error)) => return Err(error.into()),
        };
        // SAFETY: just made and of the bound context.
        let nodes = unsafe { driver.graph_nodes(graph) };
        // SAFETY: as above.
        let exec = unsafe { driver.graph_instantiate(graph) };
        // SAFETY: as above; an instantiated graph does not need its source.
        self.context
            .release("graph", |driver| unsafe { driver.graph_destroy(graph) });
        let mut graph = Graph {
            context: self.context.clone(),
            handle: exec?,
            nodes: 0,
        };
        graph.nodes = nodes?;
        Ok(graph)
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        self.context.release("stream", |driver| unsafe {
            driver.stream_destroy(self.handle)
        });
    }
}

/// A point in a stream, destroyed on drop; waits that are queued still hold.
#[derive(Debug)]
pub struct Event {
    context: Context,
    handle: EventHandle,
}

impl Event {
    /// Makes an event; with `timing` it can be measured from.
    ///
    /// # Errors
    /// What the driver says.
    pub fn new(context: &Context, timing: bool) -> Result<Event> {
        let handle = context.driver()?.event_create(timing)?;
        Ok(Event {
            context: context.clone(),
            handle,
        })
    }

    /// The driver's handle, alive as long as this.
    pub fn handle(&self) -> EventHandle {
        self.handle
    }

    /// Marks the stream's present end.
    ///
    /// # Errors
    /// What the driver says.
    pub fn record(&self, stream: &Stream) -> Result<()> {
        let driver = self.context.driver()?;
        // SAFETY: both are alive and of the bound context.
        unsafe { driver.event_record(self.handle, stream.handle) }
    }

    /// Whether the last mark has been passed; true if there is none.
    ///
    /// # Errors
    /// Failures of the work before it.
    pub fn is_passed(&self) -> Result<bool> {
        let driver = self.context.driver()?;
        // SAFETY: the event is alive and of the bound context.
        unsafe { driver.event_query(self.handle) }
    }

    /// Waits until the last mark has been passed.
    ///
    /// # Errors
    /// Failures of the work before it.
    pub fn synchronize(&self) -> Result<()> {
        let driver = self.context.driver()?;
        // SAFETY: the event is alive and of the bound context.
        unsafe { driver.event_synchronize(self.handle) }
    }

    /// Milliseconds from `start` to this, both made with timing and passed.
    ///
    /// # Errors
    /// [`super::driver::Class::NotReady`] if one has not been passed.
    pub fn elapsed_ms_since(&self, start: &Event) -> Result<f32> {
        let driver = self.context.driver()?;
        // SAFETY: both are alive and of the bound context.
        unsafe { driver.event_elapsed_ms(start.handle, self.handle) }
    }
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: made in `new`, destroyed once.
        self.context.release("event", |driver| unsafe {
            driver.event_destroy(self.handle)
        });
    }
}

/// A loaded code object, unloaded when it and its kernels are gone.
#[derive(Debug, Clone)]
pub struct Module(Arc<Loaded>);

#[derive(Debug)]
struct Loaded {
    context: Context,
    handle: ModuleHandle,
}

impl Module {
    /// Loads a code object that a compiler wrote or whose checksum was verified.
    ///
    /// # Errors
    /// An image for another architecture, or one that is damaged.
    pub fn load(context: &Context, image: &[u8]) -> Result<Module> {
        let handle = context.driver()?.module_load(image)?;
        Ok(Module(Arc::new(Loaded {
            context: context.clone(),
            handle,
        })))
    }

    /// A kernel by its unmangled name.
    ///
    /// # Errors
    /// [`Error::Kernel`] if there is none of that name.
    pub fn kernel(&self, name: &str) -> Result<Kernel> {
        let no_kernel = || Error::Kernel {
            kernel: name.to_owned(),
        };
        let c_name = CString::new(name).map_err(|_| no_kernel())?;
        let driver = self.0.context.driver()?;
        // SAFETY: the module is alive and of the bound context.
        let handle = unsafe { driver.module_function(self.0.handle, &c_name)? };
        Ok(Kernel {
            module: Arc::clone(&self.0),
            handle,
        })
    }
}

impl Drop for Loaded {
    fn drop(&mut self) {
        // SAFETY: loaded in `load`, unloaded once; whoever launched a kernel promised to
        // keep it until it has ended.
        self.context.release("module", |driver| unsafe {
            driver.module_unload(self.handle)
        });
    }
}

/// A kernel; keeps its module loaded.
#[derive(Debug, Clone)]
pub struct Kernel {
    module: Arc<Loaded>,
    handle: FunctionHandle,
}

impl Kernel {
    /// Queues a launch with the bytes of the kernel's one by-value struct,
    /// copied before the call returns.
    ///
    /// # Safety
    /// `args` is exactly the struct that the kernel declares; the addresses in it meet the kernel's
    /// contract, and this kernel is kept, until the stream has passed the launch (for a captured
    /// one: as long as the graph is launched).
    ///
    /// # Errors
    /// What the driver says; failures of earlier work may surface here.
    pub unsafe fn launch(&self, config: LaunchConfig, args: &[u8], stream: &Stream) -> Result<()> {
        let driver = self.module.context.driver()?;
        // SAFETY: function and stream are alive and of the bound context; the
        // rest is the caller's promise.
        unsafe { driver.launch(self.handle, config, args, stream.handle()) }
    }

    /// Lets launches use up to `bytes` of dynamic shared memory; needed on NVIDIA above 48 KiB.
    ///
    /// # Errors
    /// What the driver says.
    pub fn reserve_shared(&self, bytes: u32) -> Result<()> {
        let driver = self.module.context.driver()?;
        // SAFETY: the function is alive and of the bound context.
        unsafe { driver.function_reserve_shared(self.handle, bytes) }
    }
}

/// Work that was recorded once and is launched as a whole, destroyed on drop.
#[derive(Debug)]
pub struct Graph {
    context: Context,
    handle: GraphExecHandle,
    nodes: usize,
}

impl Graph {
    /// Nodes that were recorded.
    pub fn nodes(&self) -> usize {
        self.nodes
    }

    /// Queues the recorded work.
    ///
    /// # Safety
    /// The addresses and kernels that it was recorded with still meet their contracts until
    /// the stream has passed it.
    ///
    /// # Errors
    /// What the driver says; failures of earlier work may surface here.
    pub unsafe fn launch(&self, stream: &Stream) -> Result<()> {
        let driver = self.context.driver()?;
        // SAFETY: graph and stream are alive and of the bound context; the rest is the caller's
        // promise.
        unsafe { driver.graph_launch(self.handle, stream.handle()) }
    }
}

impl Drop for Graph {
    fn drop(&mut self) {
        // SAFETY: made in `capture`, destroyed once; whoever launched it promised to
        // keep it until it has ended.
        self.context.release("graph", |driver| unsafe {
            driver.graph_exec_destroy(self.handle)
        });
    }
}

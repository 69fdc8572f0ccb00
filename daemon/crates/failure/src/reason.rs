//! The reasons of failures. A reason decides everything else that programs act on: its name on the
//! wire, its kind, and with these the gRPC code and the HTTP status.

use crate::kind::Kind;

/// Declares the reasons, each with its kind and its name on the wire.
macro_rules! reasons {
    ($($(#[doc = $doc:literal])+ $reason:ident: $kind:ident = $name:literal,)+) => {
        /// The reason of a failure, machine-readable.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum Reason {
            $($(#[doc = $doc])+ $reason,)+
        }

        impl Reason {
            /// All reasons.
            pub const ALL: &[Self] = &[$(Self::$reason),+];

            /// Name of the reason in capitals, for programs. Two reasons share a name if clients
            /// handle both the same way.
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$reason => $name,)+
                }
            }

            /// Kind of failures with this reason.
            pub fn kind(self) -> Kind {
                match self {
                    $(Self::$reason => Kind::$kind,)+
                }
            }
        }
    };
}

reasons! {
    /// A field of the request has a value that is not allowed.
    InvalidField: InvalidArgument = "INVALID_FIELD",
    /// A file is not a model that can be loaded.
    BadModelFile: InvalidArgument = "BAD_MODEL_FILE",
    /// The request asks for something that is not supported.
    Unsupported: Unimplemented = "UNSUPPORTED",
    /// No model has the name that the request gives.
    UnknownModel: NotFound = "UNKNOWN_MODEL",
    /// The file of a loaded model has changed, and is to be loaded under the same name.
    LoadedFileChanged: AlreadyExists = "LOADED_FILE_CHANGED",
    /// Another file is loaded under the name.
    NameTaken: AlreadyExists = "NAME_TAKEN",
    /// A queue is full, or all places are taken.
    FullNow: ResourceExhausted = "FULL_NOW",
    /// The client has reached one of its limits.
    PeerLimit: ResourceExhausted = "PEER_LIMIT",
    /// The request alone exceeds a limit of the client, so that it can never pass.
    PeerLimitAlways: ResourceExhausted = "PEER_LIMIT",
    /// The engine has ended, or its device is lost.
    NotServing: Unavailable = "NOT_SERVING",
    /// The file of a loaded model was changed while loaded.
    ModelFileChanged: DataLoss = "MODEL_FILE_CHANGED",
    /// A model file lies on a hung file system.
    ModelFileSilent: Unavailable = "MODEL_FILE_SILENT",
    /// A model directory lies on a hung file system.
    ModelDirSilent: Unavailable = "MODEL_DIR_SILENT",
    /// The deadline of the request has passed.
    Deadline: DeadlineExceeded = "DEADLINE",
    /// The client has cancelled the request.
    Cancelled: Cancelled = "CANCELLED",
    /// The device cannot be used.
    NoDevice: FailedPrecondition = "NO_DEVICE",
    /// The daemon has broken one of its own rules.
    Bug: Internal = "BUG",
    /// The maximum number of models is loaded.
    TooManyModels: FailedPrecondition = "TOO_MANY_MODELS",
    /// Requests use the model that is to be unloaded.
    ModelBusy: FailedPrecondition = "MODEL_BUSY",
    /// The model that is to be unloaded is pinned.
    ModelPinned: FailedPrecondition = "MODEL_PINNED",
    /// The model was unloaded while the request waited or ran.
    ModelUnloaded: FailedPrecondition = "MODEL_UNLOADED",
    /// The model was unloaded and loaded again while the request waited or ran.
    ModelReloaded: FailedPrecondition = "MODEL_RELOADED",
    /// The pins would leave too little memory to run.
    PinTooLarge: FailedPrecondition = "PIN_TOO_LARGE",
    /// The model or the request needs more than the budget.
    NeverFits: FailedPrecondition = "NEVER_FITS",
    /// The driver refuses memory that the request needs.
    NoDeviceMemory: FailedPrecondition = "NO_DEVICE_MEMORY",
    /// The budget is larger or smaller than the device allows.
    BudgetOutOfRange: FailedPrecondition = "BUDGET_OUT_OF_RANGE",
    /// Memory of a model is in use, which ends soon.
    InUse: FailedPrecondition = "IN_USE",
    /// An environment variable has a value that cannot be used.
    Setting: FailedPrecondition = "SETTING",
    /// The client lacks the role that the call needs.
    RoleMissing: PermissionDenied = "ROLE_MISSING",
    /// The client did not read its response.
    Unread: ResourceExhausted = "UNREAD",
    /// The request did not arrive in time.
    RequestTooSlow: DeadlineExceeded = "REQUEST_TOO_SLOW",
    /// The request has too many bytes.
    RequestTooLarge: InvalidArgument = "REQUEST_TOO_LARGE",
    /// The prompt is longer than the context.
    ContextExceeded: InvalidArgument = "CONTEXT_EXCEEDED",
    /// The request has no valid token.
    TokenMissing: Unauthenticated = "TOKEN_MISSING",
    /// No stored response of the client has this id.
    UnknownResponse: NotFound = "UNKNOWN_RESPONSE",
    /// No kept request of the client has this id.
    UnknownRequest: NotFound = "UNKNOWN_REQUEST",
    /// The request continues a response that is not stored.
    UnknownPrevious: InvalidArgument = "UNKNOWN_PREVIOUS",
    /// The request refers to an item that is not stored.
    UnknownItem: NotFound = "UNKNOWN_ITEM",
    /// The request's body has a content coding that is not supported.
    ContentEncoding: Unimplemented = "CONTENT_ENCODING",
    /// The process that renders chat templates was killed.
    RendererKilled: Unavailable = "RENDERER_KILLED",
    /// A web page of another site has sent the request.
    ForeignOrigin: PermissionDenied = "FOREIGN_ORIGIN",
    /// No route has this path.
    NoSuchRoute: NotFound = "NO_SUCH_ROUTE",
    /// The route does not support the request's method.
    MethodNotAllowed: Unimplemented = "METHOD_NOT_ALLOWED",
    /// The daemon shuts down.
    Draining: Unavailable = "DRAINING",
    /// The file is in no model directory.
    OutsideModelDirs: PermissionDenied = "OUTSIDE_MODEL_DIRS",
    /// No model directory is configured.
    NoModelDir: PermissionDenied = "NO_MODEL_DIR",
    /// The file does not exist.
    NoSuchFile: NotFound = "NO_SUCH_FILE",
    /// Parts of a split model are missing.
    MissingParts: NotFound = "MISSING_PARTS",
    /// The file is a part of a split model, but not the first.
    NotFirstPart: InvalidArgument = "NOT_FIRST_PART",
    /// The path leads to something other than a regular file.
    NotARegularFile: InvalidArgument = "NOT_A_REGULAR_FILE",
    /// The daemon's user may not read the file.
    FileNotReadable: PermissionDenied = "FILE_NOT_READABLE",
    /// The system cannot read the file.
    FileFailed: FailedPrecondition = "FILE_NOT_READABLE",
    /// The file is being replaced.
    FileBeingReplaced: Unavailable = "FILE_BEING_REPLACED",
    /// The daemon has too many open files.
    TooManyFiles: ResourceExhausted = "TOO_MANY_FILES",
    /// The configuration has an error, so that nothing was reloaded.
    SettingsUnusable: FailedPrecondition = "SETTINGS_UNUSABLE",
    /// The chat template of the model fails.
    ChatTemplateUnusable: FailedPrecondition = "CHAT_TEMPLATE_UNUSABLE",
    /// A hub has no such model or file.
    NotOnHub: NotFound = "NOT_ON_HUB",
    /// A hub fails, rejects the request, or sends other data than it listed.
    HubFailed: Unavailable = "HUB_FAILED",
    /// The model has no chat template.
    NoChatTemplate: FailedPrecondition = "NO_CHAT_TEMPLATE",
}
